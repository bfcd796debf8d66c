// Sets of owners, each kept once: a table's entries hold numbers of sets, and share them.
//
// What a source loses everywhere at once (it is gone, or a tier of it is) is taken out of the sets,
// however many entries have them. A set may then equal another; it becomes a pointer to that one,
// and whoever has its number follows. Numbers are freed with the last entry that has them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kvist::owners {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr u32 kNone = 0xffffffff;
constexpr u32 kEmptySet = 0;
constexpr u16 kAllTiers = 0xffff;

struct Owner {
  u16 source;
  u16 tiers;
};

using Owners = std::vector<Owner>;  // by ascending source

class OwnerSets {
 public:
  OwnerSets() {
    sets_.push_back({{}, kNone, 0, 1});  // the empty set, never freed
    numbers_.emplace(std::string(), kEmptySet);
  }

  // The set that a number stands for; every other call but `attach` and `detach` takes only these.
  u32 root(u32 number) const {
    while (sets_[number].same_as != kNone) number = sets_[number].same_as;
    return number;
  }
  const Owners& operator[](u32 root) const { return sets_[root].owners; }
  bool empty(u32 root) const { return sets_[root].owners.empty(); }

  void attach(u32 number) { ++sets_[number].entries; }
  void detach(u32 number) {
    --sets_[number].entries;
    free_unused(number);
  }

  // What a set becomes by adding or removing an owner's tiers.
  u32 changed(u32 from, Owner owner, bool adds) {
    if (memo_.from == from && memo_.adds == adds && memo_.owner.source == owner.source &&
        memo_.owner.tiers == owner.tiers) {
      return memo_.to;
    }
    const u32 to = interned(edited(sets_[from].owners, owner, adds));
    memo_ = {from, to, owner, adds};
    return to;
  }

  // Takes tiers from the sources that `concerns` names, in every set. Returns how many entries have
  // an empty set now and had none before.
  template <typename Concerns>
  std::size_t take_away(u16 tiers, Concerns concerns) {
    memo_ = {};
    std::vector<bool> emptied(sets_.size());
    const auto count = static_cast<u32>(sets_.size());
    for (u32 number = 1; number < count; ++number) {
      Set& set = sets_[number];
      if (set.same_as != kNone || !loses(set.owners, tiers, concerns)) continue;
      forget(number);
      for (Owner& o : set.owners) {
        if (concerns(o.source)) o.tiers &= static_cast<u16>(~tiers);
      }
      const auto none = [](const Owner& o) { return o.tiers == 0; };
      set.owners.erase(std::remove_if(set.owners.begin(), set.owners.end(), none),
                       set.owners.end());
      emptied[number] = set.owners.empty();
      const auto [same, fresh] = numbers_.try_emplace(content(set.owners), number);
      if (fresh) continue;
      set.same_as = same->second;
      set.owners = {};
      ++sets_[same->second].pointers;
    }
    return entries_below(emptied);
  }

  std::size_t memory_bytes() const {
    std::size_t total = sets_.capacity() * sizeof(Set);
    for (const Set& set : sets_) total += 2 * set.owners.capacity() * sizeof(Owner) + kNodeBytes;
    return total;
  }

 private:
  static constexpr std::size_t kNodeBytes = 96;  // of a set in `numbers_`, roughly

  struct Set {
    Owners owners;
    u32 same_as;   // the set that this one equals, if it is a pointer
    u64 entries;   // that have this number
    u64 pointers;  // sets that point here
  };

  struct Memo {  // the last change, which the next block of a prefix mostly repeats
    u32 from = kNone, to = kNone;
    Owner owner{};
    bool adds = false;
  };

  static std::string content(const Owners& owners) {
    return {reinterpret_cast<const char*>(owners.data()), owners.size() * sizeof(Owner)};
  }

  template <typename Concerns>
  static bool loses(const Owners& owners, u16 tiers, Concerns concerns) {
    return std::any_of(owners.begin(), owners.end(), [&](const Owner& o) {
      return (o.tiers & tiers) != 0 && concerns(o.source);
    });
  }

  static Owners edited(const Owners& before, Owner owner, bool adds) {
    Owners after = before;
    auto at = std::lower_bound(after.begin(), after.end(), owner.source,
                               [](const Owner& o, u16 source) { return o.source < source; });
    const bool there = at != after.end() && at->source == owner.source;
    if (adds) {
      if (there) at->tiers |= owner.tiers;
      else after.insert(at, owner);
    } else if (there) {
      at->tiers &= static_cast<u16>(~owner.tiers);
      if (at->tiers == 0) after.erase(at);
    }
    return after;
  }

  u32 interned(Owners owners) {
    auto [found, fresh] = numbers_.try_emplace(content(owners), 0);
    if (!fresh) return found->second;
    if (free_.empty()) {
      free_.push_back(static_cast<u32>(sets_.size()));
      sets_.push_back({{}, kNone, 0, 0});
    }
    found->second = free_.back();
    free_.pop_back();
    sets_[found->second] = {std::move(owners), kNone, 0, 0};
    return found->second;
  }

  void free_unused(u32 number) {
    while (number != kEmptySet && sets_[number].entries == 0 && sets_[number].pointers == 0) {
      const u32 next = sets_[number].same_as;
      if (next == kNone) forget(number);
      sets_[number] = {{}, kNone, 0, 0};
      free_.push_back(number);
      if (memo_.from == number || memo_.to == number) memo_ = {};
      if (next == kNone) return;
      --sets_[next].pointers;
      number = next;
    }
  }

  // From now on the set is not found by its content.
  void forget(u32 number) {
    const auto found = numbers_.find(content(sets_[number].owners));
    if (found != numbers_.end() && found->second == number) numbers_.erase(found);
  }

  // Entries whose set was emptied, by its own number or by one that points to it.
  std::size_t entries_below(const std::vector<bool>& emptied) const {
    std::size_t found = 0;
    for (u32 number = 1; number < sets_.size(); ++number) {
      for (u32 at = number; sets_[number].entries != 0 && at != kNone; at = sets_[at].same_as) {
        if (emptied[at]) {
          found += sets_[number].entries;
          break;
        }
      }
    }
    return found;
  }

  std::vector<Set> sets_;
  std::vector<u32> free_;
  std::unordered_map<std::string, u32> numbers_;  // content -> set
  Memo memo_;
};

}  // namespace kvist::owners
