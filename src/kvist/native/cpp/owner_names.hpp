// What a source calls its blocks: 48 bits of a name -> the number of an entry, 10 bytes a name.
//
// The 48 bits are those that a multiplication mixes best, because engines' numbers may be small.
// Open addressing, linear probing, deletion by shifting back; grows by a half at 4/5 full.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "owner_sets.hpp"

namespace kvist::owners {

class Names {
 public:
  std::size_t size() const { return used_; }
  std::size_t memory_bytes() const { return records_.capacity() * sizeof(Record); }

  // The entry that a name leads to, or kNone.
  u32 find(const u8* name) const {
    return records_.empty() ? kNone : records_[place(Record(name, 0))].id();
  }

  void announce(const u8* name) const {
    if (!records_.empty()) __builtin_prefetch(&records_[home(Record(name, 0))]);
  }

  // Gives a name to an entry; the name has none yet.
  void put(const u8* name, u32 id) {
    if ((used_ + 1) * 5 > records_.size() * 4) grow();
    const Record record(name, id);
    records_[place(record)] = record;
    ++used_;
  }

  void erase(const u8* name) {
    if (!records_.empty()) erase_at(place(Record(name, 0)));
  }

  // Takes out the first record from a place on, and says which entry it led to. There is one.
  u32 pop(std::size_t& from) {
    if (from >= records_.size()) from = 0;
    while (records_[from].id() == kNone) from = next(from);
    const u32 id = records_[from].id();
    erase_at(from);
    return id;
  }

  template <typename Tell>
  void each(Tell tell) const {
    for (const Record& record : records_) {
      if (record.id() != kNone) tell(record.id());
    }
  }

 private:
  static constexpr std::size_t kPrintBytes = 6, kFirstPlaces = 64;

  struct Record {
    Record() { std::memset(bytes, 0xff, sizeof bytes); }
    Record(const u8* name, u32 id) {
      u64 value;
      std::memcpy(&value, name, sizeof value);
      value = value * 0x9e3779b97f4a7c15ULL >> 16;
      std::memcpy(bytes, &value, kPrintBytes);
      std::memcpy(bytes + kPrintBytes, &id, sizeof id);
    }
    u32 id() const {
      u32 value;
      std::memcpy(&value, bytes + kPrintBytes, sizeof value);
      return value;
    }
    bool same(const Record& other) const {
      return std::memcmp(bytes, other.bytes, kPrintBytes) == 0;
    }
    u8 bytes[kPrintBytes + sizeof(u32)];
  };
  static_assert(sizeof(Record) == 10);

  std::size_t next(std::size_t at) const { return at + 1 == records_.size() ? 0 : at + 1; }

  std::size_t home(const Record& record) const {
    u32 high;
    std::memcpy(&high, record.bytes + kPrintBytes - sizeof high, sizeof high);
    return static_cast<std::size_t>(u64{high} * records_.size() >> 32);
  }

  // Where a record of this name is, or would be put.
  std::size_t place(const Record& record) const {
    std::size_t at = home(record);
    while (records_[at].id() != kNone && !records_[at].same(record)) at = next(at);
    return at;
  }

  void erase_at(std::size_t at) {
    if (records_[at].id() == kNone) return;
    --used_;
    const std::size_t count = records_.size();
    for (std::size_t i = next(at); records_[i].id() != kNone; i = next(i)) {
      const std::size_t from = home(records_[i]);
      const std::size_t pushed = i >= from ? i - from : i + count - from;
      const std::size_t gap = i >= at ? i - at : i + count - at;
      if (pushed >= gap) {
        records_[at] = records_[i];
        at = i;
      }
    }
    records_[at] = Record();
  }

  void grow() {
    std::vector<Record> old(records_.empty() ? kFirstPlaces : records_.size() * 3 / 2);
    old.swap(records_);
    for (const Record& record : old) {
      if (record.id() != kNone) records_[place(record)] = record;
    }
  }

  std::vector<Record> records_;
  std::size_t used_ = 0;
};

}  // namespace kvist::owners
