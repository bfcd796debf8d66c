// The index of cached text: trees of blocks with their tokens, and fingerprints that say where to
// look; `kvist/native/span_twin.py` is its specification.
//
// Blocks (80 bytes, and their tokens) and marks (24 bytes) stand in chunks that never move and are
// found through open-addressing arrays of u32 (linear probing, deletion by shifting back, at most
// 3/4 full). Marks of one fingerprint form a chain, newest first, and so do those of one block.
// Not thread-safe: the caller's lock.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "huge.hpp"

namespace kvist::spans {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;

constexpr std::size_t kKeyBytes = 32, kScopeBytes = 16;
constexpr std::size_t kChunk = 4096;  // blocks or marks
constexpr u32 kNone = 0xffffffff;

struct Block {
  u8 key[kKeyBytes];
  u8 scope[kScopeBytes];
  u32 number;
  u32 parent, child;    // child: the newest of its children
  u32 next, prev;       // siblings, from the newest on; `next` also links what is free
  u32 older, younger;   // by when they were put
  u32 marks;            // the first of its marks
};
static_assert(sizeof(Block) == 80);

struct Mark {
  u64 fingerprint;
  u32 block, offset;
  u32 older;  // the next owner of the fingerprint; also links what is free
  u32 next;   // the next mark of the block
};
static_assert(sizeof(Mark) == 24);

// Things in chunks, numbered from 0; numbers of what was freed are given again.
template <typename Item, u32 Item::*kLink>
class Pool {
 public:
  Item& operator[](u32 id) { return chunks_[id / kChunk][id % kChunk]; }
  const Item& operator[](u32 id) const { return chunks_[id / kChunk][id % kChunk]; }
  std::size_t chunks() const { return chunks_.size(); }
  std::size_t memory_bytes() const { return chunks_.memory_bytes(); }

  u32 take() {
    if (free_ == kNone) {
      const u32 first = static_cast<u32>(chunks_.size() * kChunk);
      chunks_.add();
      for (u32 i = kChunk; i-- > 0;) give(first + i);
    }
    const u32 id = free_;
    free_ = (*this)[id].*kLink;
    return id;
  }

  void give(u32 id) {
    (*this)[id].*kLink = free_;
    free_ = id;
  }

 private:
  Chunks<Item> chunks_{kChunk};
  u32 free_ = kNone;
};

// Numbers found by a hash that `hash_of(number)` gives.
class Slots {
 public:
  std::size_t mask() const { return slots_.size() - 1; }
  u32& operator[](std::size_t slot) { return slots_[slot]; }
  u32 operator[](std::size_t slot) const { return slots_[slot]; }
  std::size_t memory_bytes() const { return slots_.size() * sizeof(u32); }
  void announce(u64 hash) const { __builtin_prefetch(&slots_[hash & mask()]); }

  // The slot of the number for which `is` holds, or the empty one where it would go.
  template <typename Is>
  std::size_t find(u64 hash, Is is) const {
    std::size_t slot = hash & mask();
    while (slots_[slot] != kNone && !is(slots_[slot])) slot = (slot + 1) & mask();
    return slot;
  }

  template <typename HashOf>
  void make_room(HashOf hash_of) {
    if (++count_ * 4 <= slots_.size() * 3) return;
    HugeVector<u32> old(slots_.size() * 2, kNone);
    old.swap(slots_);
    for (const u32 id : old) {
      if (id == kNone) continue;
      std::size_t slot = hash_of(id) & mask();
      while (slots_[slot] != kNone) slot = (slot + 1) & mask();
      slots_[slot] = id;
    }
  }

  template <typename HashOf>
  void erase(std::size_t slot, HashOf hash_of) {
    --count_;
    for (std::size_t i = (slot + 1) & mask(); slots_[i] != kNone; i = (i + 1) & mask()) {
      const std::size_t home = hash_of(slots_[i]) & mask();
      if (((i - home) & mask()) >= ((i - slot) & mask())) {
        slots_[slot] = slots_[i];
        slot = i;
      }
    }
    slots_[slot] = kNone;
  }

 private:
  HugeVector<u32> slots_ = HugeVector<u32>(1024, kNone);
  std::size_t count_ = 0;
};

class SpanTable {
 public:
  SpanTable(std::size_t block_tokens, std::size_t most_blocks, std::size_t owners)
      : block_tokens_(block_tokens), most_blocks_(most_blocks), owners_(owners),
        text_(kChunk * block_tokens) {}
  SpanTable(const SpanTable&) = delete;
  SpanTable& operator=(const SpanTable&) = delete;

  std::size_t block_tokens() const { return block_tokens_; }
  std::size_t size() const { return count_; }
  std::size_t marks() const { return marked_; }
  std::size_t evicted() const { return evicted_; }
  std::size_t crowded() const { return crowded_; }

  std::size_t memory_bytes() const {
    return blocks_.memory_bytes() + marks_.memory_bytes() + keys_.memory_bytes() +
           fingerprints_.memory_bytes() +
           text_.memory_bytes();
  }

  const Block& block(u32 id) const { return blocks_[id]; }
  const Mark& mark(u32 id) const { return marks_[id]; }
  const u32* text(u32 id) const { return &text_[id / kChunk][id % kChunk * block_tokens_]; }

  u32 find_block(const u8* key) const { return keys_[slot_of(key)]; }

  // The newest mark of a fingerprint; the others follow by `older`.
  u32 newest(u64 fingerprint) const { return fingerprints_[slot_of(fingerprint)]; }
  void announce(u64 fingerprint) const { fingerprints_.announce(fingerprint); }

  std::size_t known(const u8* keys, std::size_t count, const u32* tokens, std::size_t first_block,
                    const u8* scope, const u8* parent) const {
    u32 last = parent != nullptr ? find_block(parent) : kNone;
    for (std::size_t i = 0; i < count; ++i) {
      const u32 id = find_block(keys + i * kKeyBytes);
      if (id == kNone || !is(id, first_block + i, scope, tokens + i * block_tokens_)) return i;
      if (last != kNone && blocks_[id].parent != last && precedes(last, id)) return i;
      last = id;
    }
    return count;
  }

  std::size_t put(const u8* keys, std::size_t count, const u32* tokens, std::size_t first_block,
                  const u8* scope, const u8* parent, const i64* ends, const u64* fingerprints,
                  std::size_t mark_count) {
    count = std::min(count, most_blocks_);
    make_room(keys, count);
    const u32 before = parent != nullptr ? find_block(parent) : kNone;
    u32 last = before, first_parent = before;
    std::vector<u32> ids(count);
    std::size_t fresh = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const u8* key = keys + i * kKeyBytes;
      const u32* part = tokens + i * block_tokens_;
      u32 id = find_block(key);
      if (id != kNone && !is(id, first_block + i, scope, part)) {
        drop(key);
        if (last == id) last = kNone;
        if (first_parent == id) first_parent = kNone;
        id = kNone;
      }
      if (id == kNone) {
        id = add(key, first_block + i, scope, part);
        ++fresh;
      }
      if (blocks_[id].parent == kNone && last != kNone && precedes(last, id)) adopt(last, id);
      ids[i] = last = id;
    }
    for (std::size_t i = 0; i < mark_count; ++i) {
      const i64 size = static_cast<i64>(block_tokens_);
      const i64 number = ends[i] >= 0 ? ends[i] / size : -((size - 1 - ends[i]) / size);
      if (number >= static_cast<i64>(count)) continue;
      u32 id = number >= 0 ? ids[static_cast<std::size_t>(number)] : first_parent;
      for (i64 up = number; up < -1 && id != kNone; ++up) id = blocks_[id].parent;
      if (id == kNone || std::memcmp(blocks_[id].scope, scope, kScopeBytes) != 0) continue;
      add_mark(id, static_cast<u32>(ends[i] - number * size), fingerprints[i]);
    }
    return fresh;
  }

  bool drop(const u8* key) {
    const std::size_t slot = slot_of(key);
    const u32 id = keys_[slot];
    if (id == kNone) return false;
    keys_.erase(slot, [this](u32 other) { return hash(blocks_[other].key); });
    for (u32 mark = blocks_[id].marks; mark != kNone;) {
      const u32 next = marks_[mark].next;
      disown(mark);
      mark = next;
    }
    for (u32 child = blocks_[id].child; child != kNone;) {
      const u32 next = blocks_[child].next;
      blocks_[child].parent = blocks_[child].next = blocks_[child].prev = kNone;
      child = next;
    }
    leave_parent(id);
    leave_order(id);
    blocks_.give(id);
    --count_;
    return true;
  }

  void clear() {
    blocks_ = {};
    marks_ = {};
    keys_ = {};
    fingerprints_ = {};
    text_.clear();
    oldest_ = youngest_ = kNone;
    count_ = marked_ = 0;
  }

 private:
  static u64 hash(const u8* key) {
    u64 value;
    std::memcpy(&value, key, sizeof value);
    return value;
  }

  std::size_t slot_of(const u8* key) const {
    return keys_.find(hash(key), [&](u32 id) {
      return std::memcmp(blocks_[id].key, key, kKeyBytes) == 0;
    });
  }
  std::size_t slot_of(u64 fingerprint) const {
    return fingerprints_.find(fingerprint,
                              [&](u32 id) { return marks_[id].fingerprint == fingerprint; });
  }

  bool is(u32 id, std::size_t number, const u8* scope, const u32* tokens) const {
    const Block& block = blocks_[id];
    return block.number == number && std::memcmp(block.scope, scope, kScopeBytes) == 0 &&
           std::memcmp(text(id), tokens, block_tokens_ * sizeof(u32)) == 0;
  }

  bool precedes(u32 parent, u32 child) const {
    return blocks_[parent].number + 1 == blocks_[child].number &&
           std::memcmp(blocks_[parent].scope, blocks_[child].scope, kScopeBytes) == 0;
  }

  // What is known becomes the youngest, then the oldest go for what is not.
  void make_room(const u8* keys, std::size_t count) {
    std::size_t missing = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const u32 id = find_block(keys + i * kKeyBytes);
      if (id == kNone) {
        ++missing;
      } else {
        leave_order(id);
        join_order(id);
      }
    }
    while (count_ != 0 && count_ + missing > most_blocks_) {
      u8 key[kKeyBytes];
      std::memcpy(key, blocks_[oldest_].key, kKeyBytes);
      drop(key);
      ++evicted_;
    }
  }

  u32 add(const u8* key, std::size_t number, const u8* scope, const u32* tokens) {
    keys_.make_room([this](u32 other) { return hash(blocks_[other].key); });
    const u32 id = blocks_.take();
    while (text_.size() < blocks_.chunks()) {
      text_.add();
    }
    Block& block = blocks_[id];
    std::memcpy(block.key, key, kKeyBytes);
    std::memcpy(block.scope, scope, kScopeBytes);
    std::memcpy(const_cast<u32*>(text(id)), tokens, block_tokens_ * sizeof(u32));
    block.number = static_cast<u32>(number);
    block.parent = block.child = block.next = block.prev = block.marks = kNone;
    keys_[slot_of(key)] = id;
    join_order(id);
    ++count_;
    return id;
  }

  void adopt(u32 parent, u32 id) {
    Block& block = blocks_[id];
    block.parent = parent;
    block.prev = kNone;
    block.next = blocks_[parent].child;
    if (block.next != kNone) blocks_[block.next].prev = id;
    blocks_[parent].child = id;
  }

  void leave_parent(u32 id) {
    const Block& block = blocks_[id];
    if (block.parent == kNone) return;
    (block.prev != kNone ? blocks_[block.prev].next : blocks_[block.parent].child) = block.next;
    if (block.next != kNone) blocks_[block.next].prev = block.prev;
  }

  void join_order(u32 id) {
    blocks_[id].older = youngest_;
    blocks_[id].younger = kNone;
    (youngest_ != kNone ? blocks_[youngest_].younger : oldest_) = id;
    youngest_ = id;
  }

  void leave_order(u32 id) {
    const Block& block = blocks_[id];
    (block.older != kNone ? blocks_[block.older].younger : oldest_) = block.younger;
    (block.younger != kNone ? blocks_[block.younger].older : youngest_) = block.older;
  }

  void add_mark(u32 id, u32 offset, u64 fingerprint) {
    const std::size_t found = slot_of(fingerprint);
    std::size_t owners = 0;
    u32 oldest = kNone;
    for (u32 mark = fingerprints_[found]; mark != kNone; mark = marks_[mark].older) {
      if (marks_[mark].block == id && marks_[mark].offset == offset) return;
      ++owners;
      oldest = mark;
    }
    if (owners == owners_) {
      u32* link = &blocks_[marks_[oldest].block].marks;
      while (*link != oldest) link = &marks_[*link].next;
      *link = marks_[oldest].next;
      disown(oldest);
      ++crowded_;
    }
    if (owners == 0 || owners_ == 1) {
      fingerprints_.make_room([this](u32 other) { return marks_[other].fingerprint; });
    }
    const std::size_t slot = slot_of(fingerprint);
    const u32 mark = marks_.take();
    marks_[mark] = {fingerprint, id, offset, fingerprints_[slot], blocks_[id].marks};
    fingerprints_[slot] = mark;
    blocks_[id].marks = mark;
    ++marked_;
  }

  // Takes a mark out of its fingerprint's chain and frees it; its block's chain is the caller's.
  void disown(u32 mark) {
    const std::size_t slot = slot_of(marks_[mark].fingerprint);
    if (fingerprints_[slot] == mark) {
      if (marks_[mark].older != kNone) {
        fingerprints_[slot] = marks_[mark].older;
      } else {
        fingerprints_.erase(slot, [this](u32 other) { return marks_[other].fingerprint; });
      }
    } else {
      u32 newer = fingerprints_[slot];
      while (marks_[newer].older != mark) newer = marks_[newer].older;
      marks_[newer].older = marks_[mark].older;
    }
    marks_.give(mark);
    --marked_;
  }

  const std::size_t block_tokens_, most_blocks_, owners_;
  Pool<Block, &Block::next> blocks_;
  Pool<Mark, &Mark::older> marks_;
  Chunks<u32> text_;
  Slots keys_, fingerprints_;
  u32 oldest_ = kNone, youngest_ = kNone;
  std::size_t count_ = 0, marked_ = 0, evicted_ = 0, crowded_ = 0;
};

}  // namespace kvist::spans
