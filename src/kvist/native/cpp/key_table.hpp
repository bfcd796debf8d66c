// The index of a segment log: 32-byte key -> where its newest frame is, 80 bytes an entry.
//
// Entries stand in chunks that never move, found through an open-addressing array of u32 (linear
// probing, deletion by shifting back, at most 3/4 full). Keys are BLAKE3 digests, so their first
// bytes are the hash. Entries of one segment form a doubly linked list: dropping a segment costs
// what it holds. While segments are being read in any order, tombstones are entries too, so that
// the highest sequence of a key decides; `settle` removes them. Not thread-safe: the caller's GIL.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "huge.hpp"

namespace kvist::table {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr std::size_t kKeyBytes = 32;
constexpr std::size_t kChunk = 4096;  // entries
constexpr u32 kNone = 0xffffffff;
constexpr u32 kTombstone = 1, kHot = 2;

struct Entry {
  u8 key[kKeyBytes];
  u64 sequence, offset, raw_bytes, stored_bytes;
  u32 group, next, prev, flags;
};
static_assert(sizeof(Entry) == 80);

class KeyTable {
 public:
  KeyTable() : slots_(kFirstSlots, kNone) {}
  KeyTable(const KeyTable&) = delete;
  KeyTable& operator=(const KeyTable&) = delete;
  KeyTable(KeyTable&&) = default;
  KeyTable& operator=(KeyTable&&) = default;

  std::size_t size() const { return count_ - tombstones_; }

  std::size_t memory_bytes() const {
    return chunks_.memory_bytes() + slots_.size() * sizeof(u32) +
           groups_.size() * sizeof(Group);
  }

  // The entry of a present block, or null.
  Entry* find(const u8* key) {
    const u32 id = slots_[slot_of(key)];
    if (id == kNone || (at(id).flags & kTombstone) != 0) return nullptr;
    return &at(id);
  }

  // Three steps of a look-up that is announced ahead, so that its cache misses overlap others'.
  std::size_t home(const u8* key) const {
    const std::size_t slot = hash(key) & (slots_.size() - 1);
    __builtin_prefetch(&slots_[slot]);
    return slot;
  }
  void announce(std::size_t home) const {
    if (slots_[home] != kNone) __builtin_prefetch(&at(slots_[home]));
  }

  u64 segment_of(const Entry& entry) const { return groups_[entry.group].segment; }

  // Takes a frame over unless the key has one of a higher sequence.
  void put(const u8* key, u64 segment, const Entry& what) {
    if ((count_ + 1) * 4 > slots_.size() * 3) grow();
    const std::size_t slot = slot_of(key);
    if (slots_[slot] != kNone) {
      if (at(slots_[slot]).sequence > what.sequence) return;
      unlink(slots_[slot]);
    } else {
      slots_[slot] = allocate();
      ++count_;
    }
    Entry& entry = at(slots_[slot]);
    entry = what;
    std::memcpy(entry.key, key, kKeyBytes);
    link(slots_[slot], segment);
  }

  void erase(const u8* key) {
    std::size_t slot = slot_of(key);
    const u32 id = slots_[slot];
    if (id == kNone) return;
    unlink(id);
    at(id).next = free_;
    free_ = id;
    --count_;
    // Shift back those that were pushed past this slot.
    const std::size_t mask = slots_.size() - 1;
    for (std::size_t i = (slot + 1) & mask; slots_[i] != kNone; i = (i + 1) & mask) {
      const std::size_t home = hash(at(slots_[i]).key) & mask;
      if (((i - home) & mask) >= ((i - slot) & mask)) {
        slots_[slot] = slots_[i];
        slot = i;
      }
    }
    slots_[slot] = kNone;
  }

  // Entries of a segment, in the order in which they were put.
  std::vector<u32> members(u64 segment) const {
    std::vector<u32> found;
    const auto group = numbers_.find(segment);
    if (group == numbers_.end()) return found;
    for (u32 id = groups_[group->second].head; id != kNone; id = at(id).next) found.push_back(id);
    std::reverse(found.begin(), found.end());
    return found;
  }

  std::size_t drop_segment(u64 segment) {
    std::size_t dropped = 0;
    for (const u32 id : members(segment)) {
      dropped += (at(id).flags & kTombstone) == 0;
      u8 key[kKeyBytes];
      std::memcpy(key, at(id).key, kKeyBytes);
      erase(key);
    }
    const auto group = numbers_.find(segment);
    if (group != numbers_.end()) {
      free_groups_.push_back(group->second);
      numbers_.erase(group);
    }
    return dropped;
  }

  void settle() {
    if (tombstones_ == 0) return;
    std::vector<u64> segments;
    for (const auto& group : numbers_) segments.push_back(group.first);
    for (const u64 segment : segments) {
      for (const u32 id : members(segment)) {
        if ((at(id).flags & kTombstone) == 0) continue;
        u8 key[kKeyBytes];
        std::memcpy(key, at(id).key, kKeyBytes);
        erase(key);
      }
    }
  }

  void reserve(std::size_t more) {
    while ((count_ + more) * 4 > slots_.size() * 3) grow();
  }

  void clear() { *this = KeyTable(); }

  Entry& at(u32 id) { return chunks_[id / kChunk][id % kChunk]; }
  const Entry& at(u32 id) const { return chunks_[id / kChunk][id % kChunk]; }

 private:
  static constexpr std::size_t kFirstSlots = 1024;

  struct Group {
    u64 segment;
    u32 head;
  };

  static u64 hash(const u8* key) {
    u64 value;
    std::memcpy(&value, key, sizeof value);
    return value;
  }

  // Where `key` is, or the empty slot where it would go.
  std::size_t slot_of(const u8* key) const {
    const std::size_t mask = slots_.size() - 1;
    std::size_t slot = hash(key) & mask;
    while (slots_[slot] != kNone && std::memcmp(at(slots_[slot]).key, key, kKeyBytes) != 0) {
      slot = (slot + 1) & mask;
    }
    return slot;
  }

  void grow() {
    HugeVector<u32> old(slots_.size() * 2, kNone);
    old.swap(slots_);
    const std::size_t mask = slots_.size() - 1;
    for (const u32 id : old) {
      if (id == kNone) continue;
      std::size_t slot = hash(at(id).key) & mask;
      while (slots_[slot] != kNone) slot = (slot + 1) & mask;
      slots_[slot] = id;
    }
  }

  u32 allocate() {
    if (free_ == kNone) {
      const u32 first = static_cast<u32>(chunks_.size() * kChunk);
      chunks_.add();
      for (u32 i = kChunk; i-- > 0;) {
        at(first + i).next = free_;
        free_ = first + i;
      }
    }
    const u32 id = free_;
    free_ = at(id).next;
    return id;
  }

  void link(u32 id, u64 segment) {
    auto [found, fresh] = numbers_.try_emplace(segment, 0);
    if (fresh) {
      if (free_groups_.empty()) {
        free_groups_.push_back(static_cast<u32>(groups_.size()));
        groups_.push_back({});
      }
      found->second = free_groups_.back();
      free_groups_.pop_back();
      groups_[found->second] = {segment, kNone};
    }
    Entry& entry = at(id);
    Group& group = groups_[found->second];
    entry.group = found->second;
    entry.prev = kNone;
    entry.next = group.head;
    if (group.head != kNone) at(group.head).prev = id;
    group.head = id;
    tombstones_ += (entry.flags & kTombstone) != 0;
  }

  void unlink(u32 id) {
    Entry& entry = at(id);
    if (entry.prev != kNone) {
      at(entry.prev).next = entry.next;
    } else {
      groups_[entry.group].head = entry.next;
    }
    if (entry.next != kNone) at(entry.next).prev = entry.prev;
    tombstones_ -= (entry.flags & kTombstone) != 0;
  }

  Chunks<Entry> chunks_{kChunk};
  HugeVector<u32> slots_;
  std::vector<Group> groups_;
  std::vector<u32> free_groups_;
  std::unordered_map<u64, u32> numbers_;  // segment -> group
  u32 free_ = kNone;
  std::size_t count_ = 0, tombstones_ = 0;
};

}  // namespace kvist::table
