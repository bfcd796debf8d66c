// Who has which block: the first 16 bytes of a key -> its owners. About 50 bytes a key, and 16 for
// each name.
//
// Blocks of a prefix are mostly held by the same nodes, so sets of owners are shared
// (`owner_sets.hpp`). Entries never move and are found through an open-addressing array of their
// numbers (linear probing, deletion by shifting back, at most 3/4 full); seven bits of the hash
// stand beside each number, so that hardly any other key's entry is looked at. Keys that come one
// after another get neighbouring entries, so whoever walks along a prefix finds the next one beside
// the last, without a search.
//
// A source may have names of its own for blocks (`owner_names.hpp`); a stock engine's hashes are
// such. An entry counts the names that lead to it, and stays as long as there are any: a name never
// leads to another block than the one that it was given to.
//
// Dropping a source changes sets, not entries; those that nobody has or names any more are taken
// out when the table grows, or when half of it has no owner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "huge.hpp"
#include "owner_names.hpp"
#include "owner_sets.hpp"

namespace kvist::owners {

constexpr std::size_t kTagBytes = 16, kKeyBytes = 32;
constexpr std::size_t kMostEntries = (std::size_t{1} << 25) - 1;  // keys and names together

// A key, or a name, of 16 bytes or more.
struct Key {
  const u8* data;
  std::size_t bytes;
};

class OwnerTable {
 public:
  OwnerTable(std::size_t most_keys, std::size_t most_names)
      : most_keys_(most_keys), most_names_(most_names), slots_(kFirstSlots, kNone) {}

  std::size_t size() const { return used_ - dead_; }
  std::size_t names() const { return names_count_; }
  u64 evicted() const { return evicted_; }

  std::size_t memory_bytes() const {
    std::size_t total = slots_.size() * sizeof(u32) + entries_.memory_bytes();
    for (const Names& names : names_) total += names.memory_bytes() + sizeof(Names);
    return total + sets_.memory_bytes();
  }

  // `last` is the entry of the key before it, if any, and becomes this key's.
  void add(Owner owner, Key key, u32& last) {
    const u32 named = id_named(owner.source, key);
    if (named == kNone) return add_key(owner, key, last);
    own(named, owner);
    last = named;
  }

  void remove(Owner owner, Key key) {
    const u32 named = id_named(owner.source, key);
    const u32 id = named == kNone ? id_of(key.data) : named;
    if (id == kNone) return;
    disown(id, owner);
    if (named != kNone && tiers_of(id, owner.source) == 0) unname(owner.source, key);
    else erase_unused(id);
  }

  // Adds a block and gives it a name of its owner's. A name that leads to another block stays.
  void add_named(Owner owner, Key key, Key name, u32& last) {
    add_key(owner, key, last);
    if (std::memcmp(key.data, name.data, kTagBytes) == 0) return;
    if (names_.size() <= owner.source) names_.resize(owner.source + 1u);
    if (names_[owner.source].find(name.data) != kNone) return;
    ++at(last).names;
    names_[owner.source].put(name.data, last);
    if (++names_count_ > most_names_) evict_name();
  }

  // The key of a block that a source has, by its name or by itself; null if it has none such.
  const u8* key_held(u16 source, Key key) const {
    const u32 named = id_named(source, key);
    const u32 id = named == kNone ? id_of(key.data) : named;
    if (id == kNone || tiers_of(id, source) == 0) return nullptr;
    const bool whole = key.bytes == kKeyBytes && std::memcmp(at(id).key, key.data, kKeyBytes) == 0;
    return named != kNone || whole ? at(id).key : nullptr;
  }

  void drop(u16 source) {
    if (source < names_.size()) {
      Names gone;
      std::swap(gone, names_[source]);
      names_count_ -= gone.size();
      gone.each([&](u32 id) { let_go(id); });
    }
    dead_ += sets_.take_away(kAllTiers, [=](u16 owner) { return owner == source; });
    if (dead_ * 2 > used_) rebuild();
  }

  // Nobody has anything in these tiers any more.
  void fade(u16 tiers) {
    dead_ += sets_.take_away(tiers, [](u16) { return true; });
    if (dead_ * 2 > used_) rebuild();
  }

  // The set of a key, the empty one if there is none; marks the key as looked up. `last` is the
  // entry of the key before it, if any, and becomes this key's.
  u32 set_of(const u8* tag, u32& last) {
    last = next_id(tag, last);
    if (last == kNone) return kEmptySet;
    Entry& entry = at(last);
    if (!entry.touched) entry.touched = 1;
    return sets_.root(entry.set);
  }
  const Owners& owners(u32 root) const { return sets_[root]; }

  void announce(const u8* tag) const {
    __builtin_prefetch(&slots_[home(hash(tag))]);
  }
  void announce_name(u16 source, const u8* name) const {
    if (source < names_.size()) names_[source].announce(name);
  }

  template <typename Tell>
  void each(Tell tell) const {
    for (u32 id = 0; id < ids_; ++id) {
      if (is_used(id) && !is_dead(id)) tell(at(id).key, sets_[sets_.root(at(id).set)]);
    }
  }

 private:
  static constexpr std::size_t kFirstSlots = 1024, kChunk = 1024;
  static constexpr u32 kEntriesAhead = 64, kSlotsAhead = 32;
  static constexpr u32 kIdBits = 25, kIdMask = (1u << kIdBits) - 1;
  static constexpr u32 kFree = 0xffffffff;  // in place of a set

  struct Entry {
    u8 key[kKeyBytes];
    u32 set;  // or kFree: then the next free number stands in the key
    u32 names : 31;
    u32 touched : 1;
  };
  static_assert(sizeof(Entry) == 40);

  Entry& at(u32 id) { return entries_[id / kChunk][id % kChunk]; }
  const Entry& at(u32 id) const { return entries_[id / kChunk][id % kChunk]; }

  static u64 hash(const u8* tag) {
    u64 value;
    std::memcpy(&value, tag, sizeof value);
    return value * 0x9e3779b97f4a7c15ULL;  // stock engines' numbers may be small
  }
  std::size_t home(u64 hash) const { return hash >> 17 & (slots_.size() - 1); }
  static u32 slot_for(u64 hash, u32 id) { return static_cast<u32>(hash >> 57) << kIdBits | id; }

  bool is_used(u32 id) const { return at(id).set != kFree; }
  bool is_dead(u32 id) const { return sets_.empty(sets_.root(at(id).set)); }

  // The slot of a key: the one that has its entry, or the empty one where it would be put.
  std::size_t slot_of(const u8* tag) const {
    const std::size_t mask = slots_.size() - 1;
    const u64 hashed = hash(tag);
    const u32 like = slot_for(hashed, 0);
    std::size_t slot = home(hashed);
    while (slots_[slot] != kNone &&
           ((slots_[slot] & ~kIdMask) != like ||
            std::memcmp(at(slots_[slot] & kIdMask).key, tag, kTagBytes) != 0)) {
      slot = (slot + 1) & mask;
    }
    return slot;
  }
  u32 id_of(const u8* tag) const {
    const u32 found = slots_[slot_of(tag)];
    return found == kNone ? kNone : found & kIdMask;
  }

  // As `id_of`, but looks first beside the entry of the key before.
  u32 next_id(const u8* tag, u32 last) const {
    const u32 guess = last + 1;
    if (last != kNone && guess + kEntriesAhead < ids_) {
      __builtin_prefetch(&at(guess + kEntriesAhead));
    }
    if (last != kNone && guess < ids_ && is_used(guess) &&
        std::memcmp(at(guess).key, tag, kTagBytes) == 0) {
      return guess;
    }
    return id_of(tag);
  }

  u32 id_named(u16 source, Key name) const {
    if (source >= names_.size()) return kNone;
    return names_[source].find(name.data);
  }

  u16 tiers_of(u32 id, u16 source) const {
    for (const Owner& o : sets_[sets_.root(at(id).set)]) {
      if (o.source == source) return o.tiers;
    }
    return 0;
  }

  void add_key(Owner owner, Key key, u32& last) {
    last = next_id(key.data, last);
    if (last == kNone || is_dead(last)) {
      while (size() >= most_keys_) evict();
    }
    if (last == kNone) {
      if ((used_ + 1) * 4 > slots_.size() * 3) rebuild();
      last = allocate(key);
      put_in_slot(last);
      ++used_;
      ++dead_;
    }
    own(last, owner);
  }

  u32 allocate(Key key) {
    u32 id = free_;
    if (id == kNone) {
      if (ids_ == entries_.size() * kChunk) entries_.add();
      id = ids_++;
    } else {
      std::memcpy(&free_, at(id).key, sizeof free_);
    }
    Entry& entry = at(id);
    entry = {{}, kEmptySet, 0, 0};
    std::memcpy(entry.key, key.data, key.bytes < kKeyBytes ? key.bytes : kKeyBytes);
    sets_.attach(kEmptySet);
    return id;
  }

  void put_in_slot(u32 id) {
    const u8* key = at(id).key;
    slots_[slot_of(key)] = slot_for(hash(key), id);
  }

  void own(u32 id, Owner owner) { put(id, sets_.changed(root_of(id), owner, true)); }
  void disown(u32 id, Owner owner) { put(id, sets_.changed(root_of(id), owner, false)); }
  u32 root_of(u32 id) const { return sets_.root(at(id).set); }

  void put(u32 id, u32 to) {
    const u32 from = at(id).set;
    if (to == from) return;
    dead_ -= is_dead(id);
    dead_ += sets_.empty(to);
    sets_.attach(to);
    at(id).set = to;
    sets_.detach(from);
  }

  // A name that led to an entry is gone.
  void let_go(u32 id) {
    --at(id).names;
    erase_unused(id);
  }

  void unname(u16 source, Key name) {
    const u32 id = names_[source].find(name.data);
    names_[source].erase(name.data);
    --names_count_;
    let_go(id);
  }

  void erase_unused(u32 id) {
    if (is_dead(id) && at(id).names == 0) erase(id);
  }

  void erase(u32 id) {
    const std::size_t mask = slots_.size() - 1;
    std::size_t slot = slot_of(at(id).key);
    for (std::size_t i = (slot + 1) & mask; slots_[i] != kNone; i = (i + 1) & mask) {
      const std::size_t from = home(hash(at(slots_[i] & kIdMask).key));
      if (((i - from) & mask) >= ((i - slot) & mask)) {
        slots_[slot] = slots_[i];
        slot = i;
      }
    }
    slots_[slot] = kNone;
    free(id);
  }

  // Gives back the number of an entry that is dead and in no slot any more.
  void free(u32 id) {
    --dead_;
    --used_;
    sets_.detach(at(id).set);
    std::memcpy(at(id).key, &free_, sizeof free_);
    at(id).set = kFree;
    free_ = id;
  }

  // Takes out what nobody has or names; grows if what is left needs it.
  void rebuild() {
    for (u32 id = 0; id < ids_; ++id) {
      if (is_used(id) && is_dead(id) && at(id).names == 0) free(id);
    }
    std::size_t count = slots_.size();
    while ((used_ + 1) * 2 > count) count *= 2;
    slots_ = HugeVector<u32>(count, kNone);
    for (u32 id = 0; id < ids_; ++id) {
      if (id + kSlotsAhead < ids_) announce(at(id + kSlotsAhead).key);
      if (is_used(id)) put_in_slot(id);
    }
  }

  // A hand goes round: what was looked up since it came by stays once more.
  void evict() {
    while (true) {
      if (hand_ >= ids_) hand_ = 0;
      const u32 id = hand_++;
      if (!is_used(id) || is_dead(id)) continue;
      if (at(id).touched) {
        at(id).touched = 0;
        continue;
      }
      put(id, kEmptySet);
      erase_unused(id);
      ++evicted_;
      return;
    }
  }

  // Another hand goes round over names; who loses a name loses the block.
  void evict_name() {
    while (name_source_ >= names_.size() || names_[name_source_].size() == 0) {
      name_source_ = name_source_ + 1 < names_.size() ? name_source_ + 1 : 0;
      name_place_ = 0;
    }
    const u32 id = names_[name_source_].pop(name_place_);
    --names_count_;
    ++evicted_;
    disown(id, {static_cast<u16>(name_source_), kAllTiers});
    let_go(id);
  }

  std::size_t most_keys_, most_names_;
  HugeVector<u32> slots_;
  Chunks<Entry> entries_{kChunk};
  u32 ids_ = 0, free_ = kNone;  // numbers that were given; the first of those given back
  OwnerSets sets_;
  std::vector<Names> names_;    // by source
  std::size_t names_count_ = 0;
  std::size_t used_ = 0, dead_ = 0;  // in slots; of them, those without an owner
  u32 hand_ = 0;
  std::size_t name_source_ = 0, name_place_ = 0;
  u64 evicted_ = 0;
};

}  // namespace kvist::owners
