// How far each of several readers gets along a prefix, at several levels of tiers.
//
// A reader sees what two sources have: a replica, its engine's KV cache and the host's node. Sets
// are looked at only where they differ from the set before, and a reader is left out from its first
// miss on, so the walk ends where the last one misses. Nothing is skipped: an evicted block may
// leave a hole anywhere, so that a later block is present says nothing about those before it.
#pragma once

#include <cstddef>
#include <vector>

#include "owner_table.hpp"

namespace kvist::owners {

constexpr std::size_t kMostLevels = 8;
constexpr u16 kNobody = 0xffff;  // in place of a source

struct Reader {
  u16 first, second;
};

class Reach {
 public:
  // `levels`: the tiers that count, for each level.
  Reach(const Reader* readers, std::size_t count, std::vector<u16> levels)
      : levels_(std::move(levels)), runs_(count * levels_.size(), 0) {
    const auto all = static_cast<u8>((1u << levels_.size()) - 1);
    u16 highest = 0;
    for (std::size_t i = 0; i < count; ++i) {
      for (const u16 source : {readers[i].first, readers[i].second}) {
        if (source != kNobody && source > highest) highest = source;
      }
    }
    nobody_ = highest + 1u;
    tiers_.assign(nobody_ + 1, 0);
    for (std::size_t i = 0; i < count; ++i) {
      running_.push_back({i, index_of(readers[i].first), index_of(readers[i].second), all});
    }
  }

  // Looks at one more key. Returns whether anybody goes on.
  bool step(OwnerTable& table, const u8* tag) {
    const u32 beside = last_id_ + 1;
    const u32 set = table.set_of(tag, last_id_);
    searched_ = last_id_ != beside;
    if (set != last_set_) {
      last_set_ = set;
      narrow(table.owners(set));
    }
    walked_ += !running_.empty();
    return !running_.empty();
  }

  // Whether the last key was not found beside the one before it.
  bool searched() const { return searched_; }

  // For each reader, how many keys it has at each level. To be called once.
  const std::vector<u32>& finish() {
    for (const Running& r : running_) stop(r, r.levels);
    running_.clear();
    return runs_;
  }

 private:
  struct Running {
    std::size_t reader;
    std::size_t first, second;
    u8 levels;  // bits of those that go on
  };

  std::size_t index_of(u16 source) const { return source == kNobody ? nobody_ : source; }

  void stop(const Running& r, unsigned levels) {
    for (std::size_t n = 0; n < levels_.size(); ++n) {
      if ((levels >> n & 1) != 0) runs_[r.reader * levels_.size() + n] = walked_;
    }
  }

  void narrow(const Owners& owners) {
    for (const Owner& o : owners) {
      if (o.source < nobody_) tiers_[o.source] = o.tiers;
    }
    std::size_t kept = 0;
    for (Running r : running_) {
      const unsigned tiers = tiers_[r.first] | tiers_[r.second];
      unsigned still = 0;
      for (std::size_t n = 0; n < levels_.size(); ++n) still |= ((tiers & levels_[n]) != 0u) << n;
      still &= r.levels;
      if (still != r.levels) stop(r, r.levels & ~still);
      r.levels = static_cast<u8>(still);
      if (still != 0) running_[kept++] = r;
    }
    running_.resize(kept);
    for (const Owner& o : owners) {
      if (o.source < nobody_) tiers_[o.source] = 0;
    }
  }

  std::vector<u16> levels_;
  std::vector<u32> runs_;
  std::vector<Running> running_;
  std::vector<u16> tiers_;  // by source, and of nobody
  std::size_t nobody_ = 0;
  u32 last_id_ = kNone, last_set_ = kNone, walked_ = 0;
  bool searched_ = false;
};

}  // namespace kvist::owners
