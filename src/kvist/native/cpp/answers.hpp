// The answers to a request for blocks, out of a socket into the slots that they are for: many in
// one call, which may end in the middle of one.
//
// Bytes of a block come into a small room that stays in a cache; from there one pass hashes them and
// writes them to their slot, past the caches. That costs no more than if the kernel wrote to memory
// that is in no cache: the checksum comes free.
#pragma once

#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "hash_xxh3.hpp"

namespace kvist::net {

// Fits into a core's second cache beside what the kernel reads it from.
constexpr std::size_t kRoomBytes = std::size_t{64} << 10;
struct alignas(4096) Room {
  std::uint8_t bytes[kRoomBytes];
};
constexpr std::size_t kKeyBytes = 32;

// As it stands on the wire: little-endian, nothing between the fields.
struct Header {
  std::uint32_t index, status;
  std::uint64_t bytes, checksum;
  std::uint8_t key[kKeyBytes];
};
static_assert(sizeof(Header) == 56, "a header has 56 bytes");

struct Position {
  std::uint64_t incarnation, number;
};

enum class Found { kMiss, kHit, kDamaged };

struct Answer {
  std::size_t index;
  Found found;
  std::optional<Position> at;  // of a miss: as of when there is surely no such block
};

struct Slot {
  std::uint8_t* data;
  std::size_t bytes;
  std::uint8_t key[kKeyBytes];
  bool open = true;  // not answered yet
};

// The other side has broken a rule.
struct RuleError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Clock = std::chrono::steady_clock;

[[noreturn]] inline void fail(int code) {
  throw std::system_error(code, std::generic_category());
}

// Receives from a blocking stream socket: `bytes`, or fewer if no more come in the time that calls on
// it may take. Throws `system_error`: ECONNRESET if the other side hangs up, else what it says.
inline std::size_t receive(int fd, std::uint8_t* out, std::size_t bytes) {
  const ssize_t count = recv(fd, out, bytes, MSG_WAITALL);
  if (count == 0) fail(ECONNRESET);
  if (count < 0 && errno != EAGAIN && errno != EINTR) fail(errno);
  return count < 0 ? 0 : static_cast<std::size_t>(count);
}

// How long calls on a socket may take.
class Limit {
 public:
  // The next call may block until `end` or a sixteenth longer: to say so is a call itself.
  void set(int fd, Clock::time_point end) {
    using std::chrono::microseconds;
    const auto left = std::max(std::chrono::duration_cast<microseconds>(end - Clock::now()),
                               microseconds(1));  // none at all would mean no limit
    if (left <= limit_ && limit_ <= left + left / 16 + kSlack) return;
    timeval time{};
    time.tv_sec = static_cast<time_t>(left.count() / 1000000);
    time.tv_usec = static_cast<suseconds_t>(left.count() % 1000000);
    if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time) != 0) fail(errno);
    limit_ = left;
  }

 private:
  static constexpr std::chrono::microseconds kSlack{1000};  // kernels count in milliseconds

  std::chrono::microseconds limit_{0};
};

// Of one request. Not thread-safe; after an error it is of no use.
class Answers {
 public:
  explicit Answers(std::vector<Slot> slots) : slots_(std::move(slots)), left_(slots_.size()) {}
  Answers(const Answers&) = delete;
  Answers& operator=(const Answers&) = delete;

  // How many blocks are not answered yet.
  std::size_t left() const { return left_; }

  // Adds what is answered to `out`; see `answers_twin.Answers.take`. What came before an error is
  // returned, and the error thrown by the next call.
  void take(int fd, Clock::time_point until, Clock::duration each, Clock::duration tell,
            std::vector<Answer>& out) {
    told_ = Clock::now() + tell;
    limit_ = Limit();  // somebody else may have set another
    while (left_ > 0) {
      try {
        if (failure_) std::rethrow_exception(failure_);
        if (!step(fd, until, each)) return;
      } catch (const std::exception&) {
        if (out.empty()) throw;
        failure_ = std::current_exception();
        return;
      }
      out.push_back(answer_);
      if (Clock::now() >= told_) return;
    }
  }

 private:
  // Whether an answer is whole, which is then in `answer_`; else it is time to tell.
  bool step(int fd, Clock::time_point until, Clock::duration each) {
    const auto began = Clock::now();
    const auto late = std::min(until, began + each - waited_);
    bool there = fill(fd, late);
    if (there && slot_ == nullptr) {
      begin();
      there = fill(fd, late);
    }
    if (there) {
      end();
    } else {
      waited_ += Clock::now() - began;
    }
    return there;
  }

  // Whether what comes next is there; else it is time to tell. Throws ETIMEDOUT if it is late.
  bool fill(int fd, Clock::time_point late) {
    const auto end = std::min(late, told_);
    while (got_ < next_bytes_) {
      const std::size_t most = std::min(kRoomBytes - held_, next_bytes_ - got_);
      limit_.set(fd, end);
      const std::size_t count = receive(fd, hash_ ? room_->bytes + held_ : next_ + got_, most);
      got_ += count;
      if (hash_) empty(count);
      if (count == most) continue;
      const auto now = Clock::now();
      if (now >= late) fail(ETIMEDOUT);
      if (now >= end) return false;
    }
    return true;
  }

  // So many bytes have come into the room: when it is full, or all are there, they go on.
  void empty(std::size_t count) {
    held_ += count;
    if (held_ < kRoomBytes && got_ < next_bytes_) return;
    std::uint8_t* const out = next_ + got_ - held_;
    const auto loops = xxh3::can_stream(out) ? xxh3::best_loops<xxh3::Copying::kStream>()
                                             : xxh3::best_loops<xxh3::Copying::kStore>();
    hash_->copy(loops, out, room_->bytes, held_);
    held_ = 0;
  }

  // The header is there: what comes now is a block, a position or nothing.
  void begin() {
    Slot* const slot = header_.index < slots_.size() ? &slots_[header_.index] : nullptr;
    if (slot == nullptr || !slot->open || std::memcmp(slot->key, header_.key, kKeyBytes) != 0) {
      throw RuleError("block " + std::to_string(header_.index) +
                      " was not asked for, or came before");
    }
    const bool is_block = header_.status == 1 && header_.bytes == slot->bytes;
    const bool is_miss =
        header_.status == 0 && (header_.bytes == 0 || header_.bytes == sizeof position_);
    if (!is_block && !is_miss) {
      throw RuleError("a block of " + std::to_string(header_.bytes) + " bytes in place of " +
                      std::to_string(slot->bytes));
    }
    slot_ = slot;
    next_ = is_block ? slot->data : reinterpret_cast<std::uint8_t*>(&position_);
    next_bytes_ = header_.bytes;
    got_ = 0;
    if (is_block && slot->bytes > 240) hash_.emplace(slot->data, slot->bytes);
  }

  // The answer is whole.
  void end() {
    answer_ = Answer{header_.index, Found::kMiss, std::nullopt};
    if (header_.status == 1) {
      xxh3::end_streams();
      const auto sum = hash_ ? hash_->finish() : xxh3::checksum(slot_->data, slot_->bytes);
      answer_.found = sum == header_.checksum ? Found::kHit : Found::kDamaged;
    } else if (header_.bytes != 0) {
      answer_.at = position_;
    }
    slot_->open = false;
    --left_;
    slot_ = nullptr;
    hash_.reset();
    next_ = reinterpret_cast<std::uint8_t*>(&header_);
    next_bytes_ = sizeof header_;
    got_ = 0;
    waited_ = Clock::duration::zero();
  }

  std::vector<Slot> slots_;
  std::size_t left_;
  std::exception_ptr failure_;
  Clock::time_point told_;
  Limit limit_;
  Clock::duration waited_{};  // for this answer, in calls before this one

  Header header_;
  Position position_;
  Slot* slot_ = nullptr;  // whose answer has begun
  std::optional<xxh3::Running> hash_;
  std::uint8_t* next_ = reinterpret_cast<std::uint8_t*>(&header_);  // what comes next,
  std::size_t next_bytes_ = sizeof(Header);                         // its bytes,
  std::size_t got_ = 0;                                             // and those that came,
  std::size_t held_ = 0;                                            // the last of them in here
  std::unique_ptr<Room> room_ = std::make_unique<Room>();
  Answer answer_;
};

}  // namespace kvist::net
