// The leaves of the value policy by worth; `kvist/policy/ranking.py` is the specification and says
// how it works. All orders of heaps are total, so both find the same leaf.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "value_nodes.hpp"

namespace kvist::value {

constexpr int kAges = 64;

// Uses per block-second by class and bucket of ages; null: all are worth nothing.
using Values = const double*;

// Buckets of ages as `kvist/policy/hazard.py` draws them.
struct Ages {
  double first_s, scale;
  std::vector<double> ends_s;

  int bucket(double age_s) const {
    if (age_s < first_s) return 0;
    const double steps = std::log(age_s / first_s) * scale;
    return steps < kAges - 2 ? 1 + static_cast<int>(steps) : kAges - 1;
  }
};

inline double weight_of(int step) { return std::pow(2.0, step / 4.0); }

// A heap with the least on top.
template <typename T>
class Heap {
 public:
  bool empty() const { return items_.empty(); }
  std::size_t size() const { return items_.size(); }
  const T& top() const { return items_.front(); }
  void push(T item) {
    items_.push_back(std::move(item));
    std::push_heap(items_.begin(), items_.end(), std::greater<>());
  }
  T pop() {
    std::pop_heap(items_.begin(), items_.end(), std::greater<>());
    T item = std::move(items_.back());
    items_.pop_back();
    return item;
  }
  template <typename Stale>
  void sweep(Stale stale) {
    items_.erase(std::remove_if(items_.begin(), items_.end(), stale), items_.end());
    std::make_heap(items_.begin(), items_.end(), std::greater<>());
  }
  void clear() { items_.clear(); }

 private:
  std::vector<T> items_;
};

// Of a leaf in a group; turn and order are negated among the newest.
struct Entry {
  i64 turn, order;
  u32 node;
  bool operator>(const Entry& o) const {
    return turn != o.turn ? turn > o.turn : order > o.order;
  }
};

// Of an end of a group, or of a candidate of a walk, whose `version` is the order of its offer.
struct Offer {
  double worth;
  i64 turn, version;
  u32 leaves, node;
  bool operator>(const Offer& o) const {
    if (worth != o.worth) return worth > o.worth;
    return turn != o.turn ? turn > o.turn : version > o.version;
  }
};

struct Expiry {
  double until_s;
  i64 version;
  u32 leaves;
  bool operator>(const Expiry& o) const {
    return until_s != o.until_s ? until_s > o.until_s : version > o.version;
  }
};

class Ranking {
 public:
  Ranking(NodeTable& nodes, const Ages& ages) : nodes_(nodes), ages_(ages) {}

  // Ranks a leaf that was used, anew if it is ranked.
  void add(u32 id, i64 present_blocks) {
    Node& node = nodes_.at(id);
    if (node.end != kNone) touch(node);
    const u32 number = group_of(node);
    Leaves& leaves = *leaves_[number];
    node.order = ++order_;
    const i64 turn = node.use->turn->number;
    leaves.oldest.push({turn, node.order, id});
    leaves.newest.push({-turn, -node.order, id});
    change(number);
    const auto most = static_cast<std::size_t>(2 * present_blocks + kSweepSlack);
    if (leaves.oldest.size() > most || leaves.newest.size() > most) {
      const auto stale = [this](const Entry& e) { return !current(e); };
      leaves.oldest.sweep(stale);
      leaves.newest.sweep(stale);
    }
  }

  // Takes out a node that is no leaf any more, or must not be found for now.
  void drop(Node& node) {
    node.order = 0;
    if (node.end != kNone) touch(node);
  }

  // Says that the values changed.
  void revalue() {
    changed_ = groups_;
    for (const u32 number : changed_) leaves_[number]->changed = true;
  }

  // The leaf of least worth, of equals the one used longest ago; null if there is none.
  const Offer* best(double now_s, Values values) {
    while (!expiries_.empty() && expiries_.top().until_s <= now_s) {
      const Expiry expiry = expiries_.pop();
      if (expiry.version == leaves_[expiry.leaves]->version) change(expiry.leaves);
    }
    if (!changed_.empty()) {
      looked_.swap(changed_);
      for (const u32 number : looked_) look(number, now_s, values);
      looked_.clear();
    }
    while (!offers_.empty() && stale(offers_.top())) offers_.pop();
    return offers_.empty() ? nullptr : &offers_.top();
  }

  double worth(const Node& node, double now_s, Values values) const {
    return of(values, node.use->cls, ages_.bucket(now_s - node.use->last_s)) *
           weight_of(node.weight);
  }

  static double of(Values values, u32 cls, int bucket) {
    return values == nullptr ? 0.0 : values[cls * kAges + bucket];
  }

 private:
  static constexpr std::size_t kSweepSlack = 64;

  // The leaves of one class and one weight from both ends.
  struct Leaves {
    u32 cls;
    double weight;
    Heap<Entry> oldest, newest;
    bool changed = false, listed = false;
    i64 version = 0;
  };

  // Groups are numbered as they first appear, and listed anew, at the end, after they were empty.
  u32 group_of(const Node& node) {
    const i64 name = static_cast<i64>(node.weight) * 65536 + node.use->cls;
    auto [found, fresh] = numbers_.try_emplace(name, static_cast<u32>(leaves_.size()));
    if (fresh) {
      leaves_.push_back(std::make_unique<Leaves>());
      leaves_.back()->cls = node.use->cls;
      leaves_.back()->weight = weight_of(node.weight);
    }
    Leaves& leaves = *leaves_[found->second];
    if (!leaves.listed) {
      leaves.listed = true;
      groups_.push_back(found->second);
    }
    return found->second;
  }

  bool current(const Entry& entry) const {
    return nodes_.at(entry.node).order == (entry.order < 0 ? -entry.order : entry.order);
  }

  bool stale(const Offer& offer) const {
    return (offer.version | 1) != leaves_[offer.leaves]->version;
  }

  void change(u32 number) {
    if (leaves_[number]->changed) return;
    leaves_[number]->changed = true;
    changed_.push_back(number);
  }

  void touch(Node& node) { change(std::exchange(node.end, kNone)); }

  // Offers both ends of a group; forgets it if it has none.
  void look(u32 number, double now_s, Values values) {
    Leaves& leaves = *leaves_[number];
    leaves.changed = false;
    version_ += 2;
    leaves.version = version_ + 1;  // odd; the offer of the oldest has the even number below
    while (!leaves.oldest.empty() && !current(leaves.oldest.top())) leaves.oldest.pop();
    if (leaves.oldest.empty()) {
      leaves.newest.clear();
      leaves.listed = false;
      groups_.erase(std::remove(groups_.begin(), groups_.end(), number), groups_.end());
      return;
    }
    while (!current(leaves.newest.top())) leaves.newest.pop();
    const u32 oldest = leaves.oldest.top().node, newest = leaves.newest.top().node;
    double until_s = offer_end(leaves, number, oldest, version_, now_s, values);
    if (newest != oldest) {
      until_s = std::min(until_s, offer_end(leaves, number, newest, version_ + 1, now_s, values));
    }
    expiries_.push({until_s, leaves.version, number});
    if (offers_.size() > 4 * groups_.size() + kSweepSlack) {
      offers_.sweep([this](const Offer& o) { return stale(o); });
      expiries_.sweep([this](const Expiry& e) {
        return e.version != leaves_[e.leaves]->version;
      });
    }
  }

  // Returns until when the worth stays.
  double offer_end(const Leaves& leaves, u32 number, u32 id, i64 version, double now_s,
                   Values values) {
    Node& node = nodes_.at(id);
    const double last_s = node.use->last_s;
    const int bucket = ages_.bucket(now_s - last_s);
    const double worth = of(values, leaves.cls, bucket) * leaves.weight;
    offers_.push({worth, node.use->turn->number, version, number, id});
    node.end = number;
    return last_s + ages_.ends_s[static_cast<std::size_t>(bucket)];
  }

  NodeTable& nodes_;
  const Ages& ages_;
  std::vector<std::unique_ptr<Leaves>> leaves_;
  std::unordered_map<i64, u32> numbers_;  // by weight and class
  std::vector<u32> groups_;  // that have leaves, in the order in which they were listed
  std::vector<u32> changed_, looked_;
  Heap<Offer> offers_;
  Heap<Expiry> expiries_;
  i64 order_ = 0;
  i64 version_ = 0;
};

}  // namespace kvist::value
