// Asynchronous reads and writes in batches: io_uring by raw system calls, or a pool of threads.
//
// A Batch is a list of operations; at most `depth` of them are under way. `next` waits for any one
// and says what became of it. A batch owns its ring (or its place in the pool's queue) until every
// operation that was begun has ended: `drain` waits for that, so that memory is never given back
// while the kernel may still write to it. One thread uses a batch; an engine serves many.
#pragma once

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace kvist::io {

struct Op {
  bool write;
  int fd;
  std::int64_t offset;
  std::vector<iovec> buffers;
};

struct Done {
  std::size_t index;
  std::int64_t result;  // bytes, or -errno
};

class Batch {
 public:
  explicit Batch(std::vector<Op> ops) : ops_(std::move(ops)) {}
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;
  virtual ~Batch() = default;

  // Waits for the next operation that ends; false when all have been told of.
  virtual bool next(Done& done) = 0;
  // Begins no more and waits for what is under way.
  virtual void drain() = 0;

 protected:
  std::vector<Op> ops_;
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual std::unique_ptr<Batch> submit(std::vector<Op> ops) = 0;
};

// ---- io_uring ------------------------------------------------------------------------------

class Ring {
 public:
  explicit Ring(unsigned depth) {
    io_uring_params params{};
    fd_ = static_cast<int>(syscall(SYS_io_uring_setup, depth, &params));
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "io_uring_setup");
    sq_bytes_ = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    cq_bytes_ = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    sqe_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    sq_ = map(sq_bytes_, IORING_OFF_SQ_RING);
    cq_ = map(cq_bytes_, IORING_OFF_CQ_RING);
    sqes_ = static_cast<io_uring_sqe*>(static_cast<void*>(map(sqe_bytes_, IORING_OFF_SQES)));
    sq_tail_ = word(sq_, params.sq_off.tail);
    sq_mask_ = *word(sq_, params.sq_off.ring_mask);
    sq_array_ = word(sq_, params.sq_off.array);
    cq_head_ = word(cq_, params.cq_off.head);
    cq_tail_ = word(cq_, params.cq_off.tail);
    cq_mask_ = *word(cq_, params.cq_off.ring_mask);
    cqes_ = static_cast<io_uring_cqe*>(static_cast<void*>(cq_ + params.cq_off.cqes));
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() { release(); }

  void push(const Op& op, std::uint64_t tag) {
    const unsigned tail = *sq_tail_;
    io_uring_sqe& sqe = sqes_[tail & sq_mask_];
    std::memset(&sqe, 0, sizeof sqe);
    sqe.opcode = op.write ? IORING_OP_WRITEV : IORING_OP_READV;
    sqe.fd = op.fd;
    sqe.off = static_cast<std::uint64_t>(op.offset);
    sqe.addr = reinterpret_cast<std::uint64_t>(op.buffers.data());
    sqe.len = static_cast<unsigned>(op.buffers.size());
    sqe.user_data = tag;
    sq_array_[tail & sq_mask_] = tail & sq_mask_;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    ++unsubmitted_;
  }

  // Hands over what was pushed and waits until `wait_for` completions are there.
  void enter(unsigned wait_for) {
    do {
      const long done = syscall(SYS_io_uring_enter, fd_, unsubmitted_, wait_for,
                                wait_for != 0 ? IORING_ENTER_GETEVENTS : 0, nullptr, 0);
      if (done >= 0) {
        unsubmitted_ -= static_cast<unsigned>(done);
      } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
        throw std::system_error(errno, std::generic_category(), "io_uring_enter");
      }
    } while (unsubmitted_ != 0);
  }

  bool pop(Done& done) {
    const unsigned head = *cq_head_;
    if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
    const io_uring_cqe& cqe = cqes_[head & cq_mask_];
    done = {static_cast<std::size_t>(cqe.user_data), cqe.res};
    __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
    return true;
  }

 private:
  unsigned char* map(std::size_t bytes, std::uint64_t offset) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                    static_cast<off_t>(offset));
    if (at != MAP_FAILED) return static_cast<unsigned char*>(at);
    const int code = errno;
    release();
    throw std::system_error(code, std::generic_category(), "mmap of a ring");
  }

  static unsigned* word(unsigned char* base, unsigned offset) {
    return static_cast<unsigned*>(static_cast<void*>(base + offset));
  }

  void release() {
    if (sqes_ != nullptr) munmap(sqes_, sqe_bytes_);
    if (cq_ != nullptr) munmap(cq_, cq_bytes_);
    if (sq_ != nullptr) munmap(sq_, sq_bytes_);
    if (fd_ >= 0) close(fd_);
    sqes_ = nullptr;
    cq_ = sq_ = nullptr;
    fd_ = -1;
  }

  int fd_ = -1;
  unsigned char *sq_ = nullptr, *cq_ = nullptr;
  io_uring_sqe* sqes_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
  std::size_t sq_bytes_ = 0, cq_bytes_ = 0, sqe_bytes_ = 0;
  unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0, unsubmitted_ = 0;
};

// Rings that no batch uses now.
struct RingShelf {
  std::mutex lock;
  std::vector<std::unique_ptr<Ring>> rings;
  unsigned depth;
};

class UringBatch final : public Batch {
 public:
  UringBatch(std::shared_ptr<RingShelf> shelf, std::unique_ptr<Ring> ring, std::vector<Op> ops)
      : Batch(std::move(ops)), shelf_(std::move(shelf)), ring_(std::move(ring)) {
    refill();
    ring_->enter(0);
  }
  ~UringBatch() override { drain(); }

  bool next(Done& done) override {
    if (ring_ == nullptr || under_way_ == 0) return false;
    while (!ring_->pop(done)) ring_->enter(1);
    --under_way_;
    if (begun_ < ops_.size()) {
      refill();
      ring_->enter(0);
    }
    return true;
  }

  void drain() override {
    begun_ = ops_.size();
    Done ignored;
    while (under_way_ != 0) next(ignored);
    if (ring_ == nullptr) return;
    const std::lock_guard<std::mutex> held(shelf_->lock);
    shelf_->rings.push_back(std::move(ring_));
  }

 private:
  void refill() {
    while (begun_ < ops_.size() && under_way_ < shelf_->depth) {
      ring_->push(ops_[begun_], begun_);
      ++begun_;
      ++under_way_;
    }
  }

  std::shared_ptr<RingShelf> shelf_;
  std::unique_ptr<Ring> ring_;
  std::size_t begun_ = 0;
  unsigned under_way_ = 0;
};

class UringEngine final : public Engine {
 public:
  explicit UringEngine(unsigned depth) : shelf_(std::make_shared<RingShelf>()) {
    shelf_->depth = depth;
    auto ring = std::make_unique<Ring>(depth);
    ring->push({false, -1, 0, {}}, 0);  // fails with EBADF: proves that the kernel serves it
    ring->enter(1);
    Done done{};
    if (!ring->pop(done)) throw std::system_error(EIO, std::generic_category(), "io_uring_enter");
    shelf_->rings.push_back(std::move(ring));
  }

  std::unique_ptr<Batch> submit(std::vector<Op> ops) override {
    std::unique_ptr<Ring> ring;
    {
      const std::lock_guard<std::mutex> held(shelf_->lock);
      if (!shelf_->rings.empty()) {
        ring = std::move(shelf_->rings.back());
        shelf_->rings.pop_back();
      }
    }
    if (ring == nullptr) ring = std::make_unique<Ring>(shelf_->depth);
    return std::make_unique<UringBatch>(shelf_, std::move(ring), std::move(ops));
  }

 private:
  std::shared_ptr<RingShelf> shelf_;
};

// ---- threads -------------------------------------------------------------------------------

class PoolBatch;

struct PoolQueue {
  std::mutex lock;
  std::condition_variable work;
  std::deque<PoolBatch*> turns;  // one for each operation that may begin
  bool stopping = false;
};

class PoolBatch final : public Batch {
 public:
  PoolBatch(std::shared_ptr<PoolQueue> queue, std::vector<Op> ops)
      : Batch(std::move(ops)), queue_(std::move(queue)), left_(ops_.size()) {
    {
      const std::lock_guard<std::mutex> held(queue_->lock);
      queue_->turns.insert(queue_->turns.end(), ops_.size(), this);
    }
    queue_->work.notify_all();
  }
  ~PoolBatch() override { drain(); }

  bool next(Done& done) override {
    std::unique_lock<std::mutex> held(queue_->lock);
    if (left_ == 0) return false;
    ended_.wait(held, [&] { return !results_.empty(); });
    done = results_.front();
    results_.pop_front();
    --left_;
    return true;
  }

  void drain() override {
    std::unique_lock<std::mutex> held(queue_->lock);
    auto& turns = queue_->turns;
    turns.erase(std::remove(turns.begin(), turns.end(), this), turns.end());
    ended_.wait(held, [&] { return under_way_ == 0; });
    left_ = 0;
  }

  // A thread of the pool does one operation; `held` is the queue's lock.
  void serve(std::unique_lock<std::mutex>& held) {
    const std::size_t index = begun_++;
    ++under_way_;
    held.unlock();
    const Op& op = ops_[index];
    const int count = static_cast<int>(op.buffers.size());
    ssize_t done;
    do {
      done = op.write ? pwritev(op.fd, op.buffers.data(), count, op.offset)
                      : preadv(op.fd, op.buffers.data(), count, op.offset);
    } while (done < 0 && errno == EINTR);
    const std::int64_t result = done < 0 ? -errno : done;
    held.lock();
    results_.push_back({index, result});
    --under_way_;
    ended_.notify_all();
  }

 private:
  std::shared_ptr<PoolQueue> queue_;
  std::condition_variable ended_;
  std::deque<Done> results_;
  std::size_t begun_ = 0, under_way_ = 0, left_;
};

class PoolEngine final : public Engine {
 public:
  explicit PoolEngine(unsigned depth) : queue_(std::make_shared<PoolQueue>()) {
    threads_.reserve(depth);
    try {
      while (threads_.size() < depth) threads_.emplace_back(&PoolEngine::work, queue_);
    } catch (const std::system_error&) {
      if (threads_.empty()) throw;
    }
  }
  ~PoolEngine() override {
    {
      const std::lock_guard<std::mutex> held(queue_->lock);
      queue_->stopping = true;
    }
    queue_->work.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  std::unique_ptr<Batch> submit(std::vector<Op> ops) override {
    return std::make_unique<PoolBatch>(queue_, std::move(ops));
  }

 private:
  static void work(const std::shared_ptr<PoolQueue>& queue) {
    std::unique_lock<std::mutex> held(queue->lock);
    while (true) {
      queue->work.wait(held, [&] { return queue->stopping || !queue->turns.empty(); });
      if (queue->turns.empty()) return;
      PoolBatch* const batch = queue->turns.front();
      queue->turns.pop_front();
      batch->serve(held);
    }
  }

  std::shared_ptr<PoolQueue> queue_;
  std::vector<std::thread> threads_;
};

}  // namespace kvist::io
