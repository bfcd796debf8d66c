// Whether leaf-first LRU would have had more hits; `kvist/policy/duel.py` is the specification.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <utility>

#include "value_nodes.hpp"

namespace kvist::value {

class Duel {
 public:
  bool behind = false;  // whether LRU is the better choice now

  std::size_t turns() const { return turns_.size(); }

  // The owner had this many hits.
  void hit(i64 blocks) { deficit_ -= static_cast<double>(blocks); }

  // This many blocks were used, last before in `old`, if ever.
  void move(Turn* old, Turn& now, i64 blocks) {
    accesses_ += static_cast<double>(blocks);
    now.blocks += blocks;
    blocks_ += blocks;
    if (old == nullptr) return;
    deficit_ += static_cast<double>(blocks) * old->share;
    if (old->queued) {
      old->blocks -= blocks;
      blocks_ -= blocks;
    }
  }

  // A request begins; the owner holds so many blocks and, if `full`, had to evict to hold no more.
  std::shared_ptr<Turn> begin(i64 present_blocks, bool full) {
    if (full || present_blocks > capacity_blocks_) capacity_blocks_ = present_blocks;
    shrink();
    judge();
    auto turn = std::make_shared<Turn>();
    turn->number = ++number_;
    turns_.push_back(turn);
    if (turns_.size() > most_turns_) {
      std::deque<std::shared_ptr<Turn>> used;
      for (auto& each : turns_) {
        if (each->blocks != 0) used.push_back(std::move(each));
      }
      turns_ = std::move(used);
      turns_.push_back(turn);
      most_turns_ = 2 * turns_.size() + kSweepSlack;
    }
    return turn;
  }

 private:
  static constexpr double kFewestWindowBlocks = 20000, kWindowCapacities = 4;
  static constexpr i64 kFewestWindowTurns = 1000;
  static constexpr double kGiveUpRatio = 0.0015, kGiveUpRequests = 1.0;
  static constexpr double kTryAgainRatio = 0.00075, kMostLeadRatio = 0.03;
  static constexpr std::size_t kSweepSlack = 64;

  void shrink() {
    i64 over = blocks_ - capacity_blocks_;
    while (!turns_.empty() && turns_.front()->blocks <= over) {
      Turn& turn = *turns_.front();
      over -= turn.blocks;
      blocks_ -= turn.blocks;
      turn.share = 0.0;
      turn.queued = false;
      turns_.pop_front();
    }
    if (over > 0 && !turns_.empty()) {
      Turn& turn = *turns_.front();
      const double part = static_cast<double>(over) / static_cast<double>(turn.blocks);
      turn.share = std::min(turn.share, 1 - part);
    }
  }

  void judge() {
    ++seen_turns_;
    const double accesses = accesses_;
    const double slack = kGiveUpRequests * accesses / static_cast<double>(seen_turns_);
    const double deficit = deficit_ = std::max(deficit_, -kMostLeadRatio * accesses);
    if (!behind) {
      behind = deficit > kGiveUpRatio * accesses + slack;
      try_again_ = number_ + seen_turns_;
    } else if (deficit <= kTryAgainRatio * accesses || number_ >= try_again_) {
      behind = false;
      deficit_ = std::min(deficit, 0.0);  // forgiven
    }
    const double window_blocks =
        std::max(kFewestWindowBlocks, kWindowCapacities * static_cast<double>(capacity_blocks_));
    if (accesses > window_blocks && seen_turns_ > kFewestWindowTurns) {
      seen_turns_ /= 2;
      accesses_ /= 2;
      deficit_ /= 2;
    }
  }

  i64 number_ = 0;
  i64 try_again_ = 0;  // the turn by which it does, whatever the deficit
  i64 capacity_blocks_ = 0;
  std::deque<std::shared_ptr<Turn>> turns_;  // that LRU holds, the oldest first
  std::size_t most_turns_ = kSweepSlack;
  i64 blocks_ = 0;  // in them
  i64 seen_turns_ = 0;
  double accesses_ = 0.0;
  double deficit_ = 0.0;  // hits of LRU without those of the owner
};

}  // namespace kvist::value
