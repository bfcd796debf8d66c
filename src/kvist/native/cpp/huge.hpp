// Memory of large tables: in huge pages, where the kernel grants them. A random read of small pages
// waits for the TLB, on virtual machines many times as long as for the memory itself.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvist {

constexpr std::size_t kHugeBytes = std::size_t{2} << 20;

// What is at least as large as a huge page begins on one, and asks for them.
template <typename T>
struct HugeAllocator {
  using value_type = T;
  HugeAllocator() = default;
  template <typename U>
  HugeAllocator(const HugeAllocator<U>&) {}

  T* allocate(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    if (bytes < kHugeBytes) return static_cast<T*>(::operator new(bytes));
    const std::size_t whole = (bytes + kHugeBytes - 1) / kHugeBytes * kHugeBytes;
    void* memory = std::aligned_alloc(kHugeBytes, whole);
    if (memory == nullptr) throw std::bad_alloc();
    ::madvise(memory, whole, MADV_HUGEPAGE);  // a wish: refused, it costs nothing
    return static_cast<T*>(memory);
  }

  void deallocate(T* memory, std::size_t count) {
    if (count * sizeof(T) < kHugeBytes) {
      ::operator delete(memory);
    } else {
      std::free(memory);
    }
  }

  // What is not initialised is not touched either.
  template <typename U>
  void construct(U* place) {
    ::new (static_cast<void*>(place)) U;
  }
  template <typename U, typename... Args>
  void construct(U* place, Args&&... args) {
    ::new (static_cast<void*>(place)) U(std::forward<Args>(args)...);
  }

  friend bool operator==(const HugeAllocator&, const HugeAllocator&) { return true; }
  friend bool operator!=(const HugeAllocator&, const HugeAllocator&) { return false; }
};

template <typename T>
using HugeVector = std::vector<T, HugeAllocator<T>>;

// Arrays of equal length that never move. While there are few they are allocated one by one, later
// so many at a time that they fill whole huge pages.
template <typename T>
class Chunks {
  static_assert(std::is_trivially_destructible_v<T>, "what was allocated ahead was never made");

 public:
  explicit Chunks(std::size_t items) : items_(items), group_(group_of(items * sizeof(T))) {}

  T* operator[](std::size_t chunk) { return starts_[chunk]; }
  const T* operator[](std::size_t chunk) const { return starts_[chunk]; }
  std::size_t size() const { return starts_.size(); }
  std::size_t memory_bytes() const { return allocated_ * items_ * sizeof(T); }

  // One more, all zeros.
  void add() {
    if (spare_ == 0) {
      spare_ = starts_.size() < group_ ? 1 : group_;
      allocated_ += spare_;
      next_ = pieces_.emplace_back(spare_ * items_).data();
    }
    std::uninitialized_value_construct_n(next_, items_);
    starts_.push_back(next_);
    next_ += items_;
    --spare_;
  }

  void clear() {
    starts_.clear();
    pieces_.clear();
    spare_ = allocated_ = 0;
  }

 private:
  // The least number of chunks that leaves at most a 64th of its huge pages empty.
  static std::size_t group_of(std::size_t bytes) {
    std::size_t group = 1;
    while (((kHugeBytes - group * bytes % kHugeBytes) % kHugeBytes) * 64 > group * bytes) ++group;
    return group;
  }

  std::size_t items_, group_;
  std::vector<HugeVector<T>> pieces_;
  std::vector<T*> starts_;
  T* next_ = nullptr;
  std::size_t spare_ = 0, allocated_ = 0;
};

}  // namespace kvist
