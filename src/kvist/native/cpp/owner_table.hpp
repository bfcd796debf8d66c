// The directory's table: first 16 bytes of a key -> who has the block, 20 bytes an entry.
//
// Blocks of a prefix are mostly held by the same nodes, so sets of owners are interned: an entry is a
// tag and the number of a set, and a set is shared by all entries that have it. Dropping a source
// therefore changes the few sets that name it, not the entries; those whose set became empty are
// taken out when they are half of the table, or when it grows. Two sets may then be equal; only one
// of them is found by its content, the other lives until nobody has it.
//
// Open addressing, linear probing, deletion by shifting back, at most 3/4 full. Not thread-safe: the
// caller's GIL.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kvist::owners {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr std::size_t kTagBytes = 16;
constexpr u32 kNone = 0xffffffff, kTouched = 0x80000000, kSetMask = 0x7fffffff;
constexpr u32 kEmptySet = 0;

struct Owner {
  u16 source;
  u8 tiers;
};

using Owners = std::vector<Owner>;  // by ascending source

class OwnerTable {
 public:
  explicit OwnerTable(std::size_t most_keys)
      : most_keys_(most_keys), entries_(kFirstSlots, Entry{{}, kNone}) {
    sets_.push_back({{}, 1});  // the empty set, never freed
    numbers_.emplace(std::string(), kEmptySet);
  }

  std::size_t size() const { return used_ - dead_; }
  u64 evicted() const { return evicted_; }

  std::size_t memory_bytes() const {
    std::size_t total = entries_.size() * sizeof(Entry) + sets_.capacity() * sizeof(Set);
    for (const Set& set : sets_) total += 2 * set.owners.capacity() * sizeof(Owner) + kNodeBytes;
    return total;
  }

  void add(u16 source, u8 tiers, const u8* tag) {
    std::size_t slot = slot_of(tag);
    if (entries_[slot].set == kNone) {
      if (size() >= most_keys_) evict();
      if ((used_ + 1) * 4 > entries_.size() * 3) rebuild();
      slot = slot_of(tag);
      std::memcpy(entries_[slot].tag, tag, kTagBytes);
      entries_[slot].set = kEmptySet;
      ++sets_[kEmptySet].refs;
      ++used_;
      ++dead_;
    } else if (is_dead(entries_[slot]) && size() >= most_keys_) {
      evict();
      return add(source, tiers, tag);
    }
    move(entries_[slot], {source, tiers}, true);
  }

  void remove(u16 source, u8 tiers, const u8* tag) {
    const std::size_t slot = slot_of(tag);
    if (entries_[slot].set == kNone || is_dead(entries_[slot])) return;
    move(entries_[slot], {source, tiers}, false);
    if (is_dead(entries_[slot])) erase(slot);
  }

  void drop(u16 source) {
    for (u32 number = 1; number < sets_.size(); ++number) {
      Set& set = sets_[number];
      const auto found = std::find_if(set.owners.begin(), set.owners.end(),
                                      [&](const Owner& o) { return o.source == source; });
      if (set.refs == 0 || found == set.owners.end()) continue;
      forget(number);
      set.owners.erase(found);
      if (set.owners.empty()) dead_ += set.refs;
      else numbers_.try_emplace(content(set.owners), number);
    }
    memo_ = {};
    if (dead_ * 2 > used_) rebuild();
  }

  // The owners of a key; marks it as looked up.
  const Owners& find(const u8* tag) {
    Entry& entry = entries_[slot_of(tag)];
    if (entry.set == kNone) return sets_[kEmptySet].owners;
    entry.set |= kTouched;
    return sets_[entry.set & kSetMask].owners;
  }

  // The number of a key's set, the empty one if there is none; marks it as looked up.
  u32 set_at(const u8* tag) {
    Entry& entry = entries_[slot_of(tag)];
    if (entry.set == kNone) return kEmptySet;
    entry.set |= kTouched;
    return entry.set & kSetMask;
  }
  const Owners& owners(u32 set) const { return sets_[set].owners; }

  void announce(const u8* tag) const {
    __builtin_prefetch(&entries_[hash(tag) & (entries_.size() - 1)]);
  }

  template <typename Tell>
  void each(Tell tell) const {
    for (const Entry& entry : entries_) {
      if (entry.set != kNone && !is_dead(entry)) tell(entry.tag, owners(entry.set & kSetMask));
    }
  }

 private:
  static constexpr std::size_t kFirstSlots = 1024;
  static constexpr std::size_t kNodeBytes = 96;  // of a set in `numbers_`, roughly

  struct Entry {
    u8 tag[kTagBytes];
    u32 set;
  };
  static_assert(sizeof(Entry) == 20);

  struct Set {
    Owners owners;
    u64 refs;  // entries that have it
  };

  struct Memo {  // the last move, which the next block of a prefix mostly repeats
    u32 from = kNone, to = kNone;
    Owner owner{};
    bool adds = false;
  };

  static u64 hash(const u8* tag) {
    u64 value;
    std::memcpy(&value, tag, sizeof value);
    return value * 0x9e3779b97f4a7c15ULL >> 17;  // stock engines' numbers may be small
  }

  static std::string content(const Owners& owners) {
    std::string text;
    text.reserve(owners.size() * 3);
    for (const Owner& o : owners) {
      text.push_back(static_cast<char>(o.source & 0xff));
      text.push_back(static_cast<char>(o.source >> 8));
      text.push_back(static_cast<char>(o.tiers));
    }
    return text;
  }

  bool is_dead(const Entry& entry) const { return sets_[entry.set & kSetMask].owners.empty(); }

  std::size_t slot_of(const u8* tag) const {
    const std::size_t mask = entries_.size() - 1;
    std::size_t slot = hash(tag) & mask;
    while (entries_[slot].set != kNone &&
           std::memcmp(entries_[slot].tag, tag, kTagBytes) != 0) {
      slot = (slot + 1) & mask;
    }
    return slot;
  }

  // Gives an entry the set that its own becomes by adding or removing an owner's tiers.
  void move(Entry& entry, Owner owner, bool adds) {
    const u32 from = entry.set & kSetMask;
    u32 to = memo_.to;
    if (memo_.from != from || memo_.adds != adds || memo_.owner.source != owner.source ||
        memo_.owner.tiers != owner.tiers) {
      to = interned(changed(sets_[from].owners, owner, adds));
      memo_ = {from, to, owner, adds};
    }
    if (to == from) return;
    dead_ -= sets_[from].owners.empty();
    dead_ += sets_[to].owners.empty();
    ++sets_[to].refs;
    entry.set = to | (entry.set & kTouched);
    release(from);
  }

  static Owners changed(const Owners& before, Owner owner, bool adds) {
    Owners after = before;
    auto at = std::lower_bound(after.begin(), after.end(), owner.source,
                               [](const Owner& o, u16 source) { return o.source < source; });
    const bool there = at != after.end() && at->source == owner.source;
    if (adds) {
      if (there) at->tiers |= owner.tiers;
      else after.insert(at, owner);
    } else if (there) {
      at->tiers &= static_cast<u8>(~owner.tiers);
      if (at->tiers == 0) after.erase(at);
    }
    return after;
  }

  u32 interned(Owners owners) {
    auto [found, fresh] = numbers_.try_emplace(content(owners), 0);
    if (!fresh) return found->second;
    if (free_.empty()) {
      free_.push_back(static_cast<u32>(sets_.size()));
      sets_.push_back({});
    }
    found->second = free_.back();
    free_.pop_back();
    sets_[found->second] = {std::move(owners), 0};
    return found->second;
  }

  void release(u32 number) {
    if (--sets_[number].refs != 0 || number == kEmptySet) return;
    forget(number);
    sets_[number].owners = {};
    free_.push_back(number);
    if (memo_.from == number || memo_.to == number) memo_ = {};
  }

  // From now on the set is not found by its content.
  void forget(u32 number) {
    const auto found = numbers_.find(content(sets_[number].owners));
    if (found != numbers_.end() && found->second == number) numbers_.erase(found);
  }

  void erase(std::size_t slot) {
    dead_ -= is_dead(entries_[slot]);
    release(entries_[slot].set & kSetMask);
    --used_;
    const std::size_t mask = entries_.size() - 1;
    for (std::size_t i = (slot + 1) & mask; entries_[i].set != kNone; i = (i + 1) & mask) {
      const std::size_t home = hash(entries_[i].tag) & mask;
      if (((i - home) & mask) >= ((i - slot) & mask)) {
        entries_[slot] = entries_[i];
        slot = i;
      }
    }
    entries_[slot].set = kNone;
  }

  // Takes out the dead; grows if what is left needs it.
  void rebuild() {
    std::size_t slots = entries_.size();
    while ((size() + 1) * 2 > slots) slots *= 2;
    std::vector<Entry> old(slots, Entry{{}, kNone});
    old.swap(entries_);
    hand_ = 0;
    for (const Entry& entry : old) {
      if (entry.set == kNone) continue;
      if (is_dead(entry)) {
        --used_;
        --dead_;
        release(entry.set & kSetMask);
      } else {
        entries_[slot_of(entry.tag)] = entry;
      }
    }
  }

  // A hand goes round: who was looked up since it came by stays once more.
  void evict() {
    const std::size_t mask = entries_.size() - 1;
    while (true) {
      Entry& entry = entries_[hand_ & mask];
      if (entry.set != kNone && !is_dead(entry)) {
        if ((entry.set & kTouched) == 0) break;
        entry.set &= kSetMask;
      }
      hand_ = (hand_ + 1) & mask;
    }
    erase(hand_ & mask);
    ++evicted_;
  }

  std::size_t most_keys_;
  std::vector<Entry> entries_;
  std::vector<Set> sets_;
  std::vector<u32> free_;
  std::unordered_map<std::string, u32> numbers_;  // content -> set
  Memo memo_;
  std::size_t used_ = 0, dead_ = 0;  // dead: of the empty set, or of one that became empty
  std::size_t hand_ = 0;
  u64 evicted_ = 0;
};

}  // namespace kvist::owners
