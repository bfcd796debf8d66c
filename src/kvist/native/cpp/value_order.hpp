// Kvist's own eviction order; `kvist/policy/value_twin.py` is the specification and says how it
// works. Not thread-safe: the owner's lock and the GIL.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "value_duel.hpp"
#include "value_hazard.hpp"
#include "value_nodes.hpp"
#include "value_ranking.hpp"

namespace kvist::value {

constexpr u32 kUseClasses = 8, kOutputClasses = 3, kFinishes = 4;
constexpr u32 kPartialClass = kUseClasses * kOutputClasses * kFinishes;
constexpr u32 kClasses = kPartialClass + 1;
constexpr int kMostUses = 10;
constexpr std::int64_t kLongOutputTokens = 128;
constexpr u32 kClassOfUses[kMostUses + 1] = {0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 7};

// Answers that only Python has.
struct Callbacks {
  std::function<double()> clock;
  std::function<int(PyObject*)> weigh;  // the step of a key's weight; empty: all weigh the same
  Revise revise;
};

class Order {
 public:
  Order(Callbacks python, std::size_t ghost_blocks, Ages ages)
      : python_(std::move(python)), ghost_blocks_(ghost_blocks), ages_(std::move(ages)),
        ranking_(nodes_, ages_), table_(kClasses, python_.clock()), turn_(duel_.begin(0, false)) {}
  Order(const Order&) = delete;
  Order& operator=(const Order&) = delete;
  ~Order() { Py_XDECREF(partial_); }

  std::size_t size() const { return present_; }
  std::size_t remembered() const { return nodes_.size(); }
  std::size_t turns() const { return duel_.turns(); }

  // `partial`: a key, or null.
  void begin(u32 request_class, PyObject* partial) {
    request_class_ = request_class;
    Py_XINCREF(partial);
    Py_XDECREF(std::exchange(partial_, partial));
    begin_turn(python_.clock());
    count_request();
  }

  // `parent`: a key, or null.
  void insert(PyObject* key, PyObject* parent) {
    const u32 id = nodes_.is(below_, key) ? below_ : node_of(key);
    if (nodes_.at(id).present) {
      ++hits_;
    } else {
      enter(id, parent != nullptr && same_key(parent, key) ? nullptr : parent);
    }
    use(id);
  }

  void touch(PyObject* key) {
    const u32 id = find(key);
    if (id == kNone || !nodes_.at(id).present) return;
    ++hits_;
    use(id);
  }

  void remove(PyObject* key) {
    const u32 id = nodes_.is(offered_, key) ? offered_ : find(key);
    if (id == kNone || !nodes_.at(id).present) return;
    Node& node = nodes_.at(id);
    node.present = false;
    --present_;
    if (node.order != 0) ranking_.drop(node);
    const u32 parent_id = node.parent;
    remember(id);
    if (parent_id == kNone) return;
    Node& parent = nodes_.at(parent_id);
    if (--parent.children != 0) return;
    if (!parent.present) {
      remember(parent_id);  // a ghost that its children held up
    } else if (id != offered_) {  // else the walk goes on to the parent
      rank(parent_id);
    }
  }

  bool prefers(PyObject* key) {
    settle();
    const double now_s = python_.clock();
    const Offer* victim = ranking_.best(now_s, values_);
    if (victim == nullptr) return true;
    const double bar = victim->worth;
    const u32 id = find(key);
    const Use* last = id == kNone ? nullptr : nodes_.at(id).use.get();
    const u32 cls = request_class_ + kClassOfUses[uses_after(last)];
    double worth = Ranking::of(values_, cls, 0);
    if (python_.weigh) worth *= weight_of(python_.weigh(key));
    return worth >= bar;
  }

 private:
  friend class Walk;
  static constexpr i64 kEarlyRequests = 400, kEarlyRefreshRequests = 25, kRefreshRequests = 50;
  static constexpr i64 kRefreshAccesses = 500, kFewestRequests = 40, kFewestAccesses = 2000;
  static constexpr i64 kFadeRequests = 2000, kRequestAccesses = 256;
  static constexpr double kFade = 0.9, kSameMomentS = 0.01;
  static constexpr double kNever = -std::numeric_limits<double>::infinity();
  static constexpr int kPartialUses = kMostUses + 1;  // where a partial block's use stands

  static int uses_after(const Use* last) {
    return last == nullptr ? 0 : std::min(last->uses + 1, kMostUses);
  }

  static Py_hash_t hash(PyObject* key) { return PyObject_Hash(key); }
  u32 find(PyObject* key) { return nodes_.find(key, hash(key)); }

  u32 node_of(PyObject* key) {
    const u32 id = find(key);
    if (id != kNone) return id;
    // First, as it may raise.
    const int weight = python_.weigh ? python_.weigh(key) : 0;
    const u32 added = nodes_.add(key, hash(key));
    nodes_.at(added).weight = weight;
    return added;
  }

  void enter(u32 id, PyObject* parent_key) {
    Node& node = nodes_.at(id);
    u32 parent_id = kNone;
    if (parent_key != nullptr) {
      parent_id = nodes_.is(node.parent, parent_key) ? node.parent : node_of(parent_key);
    }
    node.present = true;
    ++present_;
    node.parent = below_ = parent_id;
    if (parent_id == kNone) return;
    Node& parent = nodes_.at(parent_id);
    ++parent.children;
    if (parent.order != 0) ranking_.drop(parent);
  }

  void use(u32 id) {
    const double now_s = python_.clock();
    if (now_s - now_s_ > kSameMomentS) begin_turn(now_s);
    Node& node = nodes_.at(id);
    const UsePtr old = node.use;
    if (run_to_ && old.get() == run_from_.get()) {
      ++run_blocks_;
    } else {
      flush();
      run_from_ = old;
      run_to_ = use_of(uses_after(old.get()));
      run_blocks_ = 1;
    }
    node.use = run_to_;
    if (node.children == 0) {
      if (partial_ != nullptr && same_key(node.key, partial_) &&
          table_.values()[request_class_ * kAges] >= 0) {
        use_partial(node, old.get());
      }
      rank(id);
    }
    if (++accesses_ >= kRequestAccesses) count_request();
  }

  UsePtr new_use(u32 cls, int uses) const {
    return UsePtr(new Use{cls, uses, now_s_, table_.cohort(), turn_});
  }

  // The use by this request of blocks that were used so often before.
  const UsePtr& use_of(int uses) {
    UsePtr& use = uses_[uses];
    if (!use) use = new_use(request_class_ + kClassOfUses[uses], uses);
    return use;
  }

  void use_partial(Node& node, const Use* old) {
    flush();
    UsePtr& use = uses_[kPartialUses];
    if (!use) use = new_use(kPartialClass, uses_after(old));
    HazardTable::merged(*node.use->cohort).waiting[node.use->cls] -= 1;
    HazardTable::merged(*use->cohort).waiting[kPartialClass] += 1;
    node.use = use;
  }

  // Ends the run: adds its blocks to the tables.
  void flush() {
    if (!run_to_) return;
    const UsePtr now = std::exchange(run_to_, UsePtr());
    HazardTable::merged(*now->cohort).waiting[now->cls] += static_cast<double>(run_blocks_);
    if (!run_from_) {
      duel_.move(nullptr, *now->turn, run_blocks_);
      return;
    }
    const Use& old = *run_from_.get();
    duel_.move(old.turn.get(), *now->turn, run_blocks_);
    table_.ended_wait(*old.cohort, old.cls, ages_.bucket(now_s_ - old.last_s), run_blocks_);
  }

  void begin_turn(double now_s) {
    flush();
    // Only now: a clock may stand at 0 before the first request and at the epoch after.
    if (now_s_ == kNever) table_ = HazardTable(kClasses, now_s);
    now_s_ = now_s;
    duel_.hit(std::exchange(hits_, 0));
    turn_ = duel_.begin(present_, std::exchange(evicted_, false));
    for (UsePtr& use : uses_) use = UsePtr();
    const bool learned = learned_from_ >= kFewestAccesses && requests_ >= kFewestRequests;
    const Values values = learned && !duel_.behind ? table_.values() : nullptr;
    if (values != values_) {
      values_ = values;
      ranking_.revalue();
    }
  }

  void count_request() {
    unrefreshed_ += std::exchange(accesses_, 0);
    const i64 n = ++requests_;
    if (n % kFadeRequests == 0) table_.fade(kFade);
    const bool early = n <= kEarlyRequests;
    if (n - refreshed_ < (early ? kEarlyRefreshRequests : kRefreshRequests)) return;
    if (!early && unrefreshed_ < kRefreshAccesses) return;
    learned_from_ += std::exchange(unrefreshed_, 0);
    refreshed_ = n;
    flush();
    table_.refresh(python_.clock(), ages_, python_.revise);
    ranking_.revalue();
  }

  void rank(u32 id) {
    if (nodes_.at(id).use) ranking_.add(id, present_);
  }

  void remember(u32 ghost) {
    ghosts_.push_back(ghost);
    ++nodes_.at(ghost).queued;
    while (ghosts_.size() > ghost_blocks_) {
      const u32 id = ghosts_.front();
      ghosts_.pop_front();
      Node& oldest = nodes_.at(id);
      --oldest.queued;
      // It may be in the queue once more, be present again, or hold up a child.
      if (oldest.queued != 0 || oldest.present || oldest.children != 0) continue;
      if (id == below_) below_ = kNone;
      nodes_.erase(id);
    }
  }

  // Ends a walk: the leaves that it found or skipped are ranked.
  void settle() {
    ++walks_;
    if (offered_ != kNone) {
      const u32 parent = nodes_.at(offered_).parent;
      loose_.push_back(std::exchange(offered_, kNone));
      if (parent != kNone) loose_.push_back(parent);
    }
    for (const u32 id : loose_) {
      const Node& node = nodes_.at(id);
      if (node.present && node.children == 0 && node.order == 0) rank(id);
    }
    loose_.clear();
  }

  Callbacks python_;
  std::size_t ghost_blocks_;
  Ages ages_;
  NodeTable nodes_;  // present and ghosts
  std::deque<u32> ghosts_;
  u32 below_ = kNone;  // parent of the last new block: often the next to come
  i64 present_ = 0;
  Duel duel_;
  Ranking ranking_;
  HazardTable table_;
  Values values_ = nullptr;
  u32 offered_ = kNone;      // by the walk, which has not gone on since
  std::vector<u32> loose_;   // found or skipped by a walk, and not ranked
  u64 walks_ = 0;
  u32 request_class_ = 2 * kOutputClasses * kUseClasses;  // of hints that say nothing
  PyObject* partial_ = nullptr;
  i64 requests_ = 0;
  i64 accesses_ = 0;
  i64 refreshed_ = 0;     // the request of the last refresh
  i64 unrefreshed_ = 0;   // accesses since then
  i64 learned_from_ = 0;  // accesses until then
  bool evicted_ = false;  // in this turn
  i64 hits_ = 0;          // in this turn
  double now_s_ = kNever;
  std::shared_ptr<Turn> turn_;
  UsePtr uses_[kPartialUses + 1];  // of this request
  UsePtr run_from_;
  UsePtr run_to_;  // null: no run goes on
  i64 run_blocks_ = 0;
};

}  // namespace kvist::value
