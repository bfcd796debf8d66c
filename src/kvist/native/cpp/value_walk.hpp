// A walk over the victims of the value policy; `kvist/policy/value_twin.py` is the specification.
#pragma once

#include <unordered_map>
#include <utility>

#include "value_order.hpp"

namespace kvist::value {

// One walk over the victims, best first. Closing it ranks what it found or skipped.
class Walk {
 public:
  explicit Walk(Order& order) : order_(order) {}
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;
  ~Walk() { close(); }

  // The next victim's key, borrowed; null at the end.
  PyObject* next() {
    if (state_ == State::kDone) return nullptr;
    if (state_ == State::kNew) {
      state_ = State::kDone;  // should the clock raise
      order_.settle();
      number_ = order_.walks_;
      values_ = order_.values_;
      now_s_ = order_.python_.clock();
      order_.evicted_ = true;
      state_ = State::kWalking;
      node_ = best();
    } else {
      node_ = after(node_);
    }
    if (node_ == kNone) {
      close();
      return nullptr;
    }
    order_.offered_ = node_;
    return order_.nodes_.at(node_).key;
  }

  void close() {
    if (std::exchange(state_, State::kDone) != State::kWalking) return;
    if (order_.walks_ == number_) order_.settle();
  }

 private:
  enum class State { kNew, kWalking, kDone };

  u32 after(u32 id) {
    order_.offered_ = kNone;
    Node& node = order_.nodes_.at(id);
    const u32 parent_id = node.parent;
    if (node.present) {
      order_.ranking_.drop(node);
      order_.loose_.push_back(id);
      if (parent_id != kNone) ++skipped_[parent_id];
    }
    if (parent_id == kNone) return best();
    Node& parent = order_.nodes_.at(parent_id);
    if (!parent.present) return best();
    if (parent.children == 0) {
      if (alike(parent, node)) return parent_id;
      order_.loose_.push_back(parent_id);
      offer(ready_, parent_id);
    } else if (!skipped_.empty()) {
      const auto found = skipped_.find(parent_id);
      if (found != skipped_.end() && found->second == parent.children) offer(blocked_, parent_id);
    }
    return best();
  }

  // Whether both are of one request, class and weight, and so of one worth.
  static bool alike(const Node& parent, const Node& child) {
    const Use* const one = parent.use.get();
    const Use* const other = child.use.get();
    if (one == nullptr || other == nullptr || parent.weight != child.weight) return false;
    return one == other || (one->turn == other->turn && one->cls == other->cls);
  }

  // Queues a node by its worth now.
  void offer(Heap<Offer>& queue, u32 id) {
    const Node& node = order_.nodes_.at(id);
    if (!node.use) return;
    const double worth = order_.ranking_.worth(node, now_s_, values_);
    queue.push({worth, node.use->turn->number, ++offers_, 0, id});
  }

  // The best candidate that was not given yet.
  u32 best() {
    const Offer* ranked = order_.ranking_.best(now_s_, values_);
    if (ranked != nullptr && (ready_.empty() || !after(*ranked, ready_.top()))) {
      return ranked->node;
    }
    for (Heap<Offer>* queue : {&ready_, &blocked_}) {
      while (!queue->empty()) {
        const u32 id = queue->pop().node;
        if (order_.nodes_.at(id).key != nullptr) return id;  // else another walk took it
      }
      if (ranked != nullptr) return ranked->node;
    }
    return kNone;
  }

  static bool after(const Offer& one, const Offer& other) {
    return one.worth != other.worth ? one.worth > other.worth : one.turn > other.turn;
  }

  Order& order_;
  State state_ = State::kNew;
  u64 number_ = 0;
  Values values_ = nullptr;
  double now_s_ = 0;
  u32 node_ = kNone;
  i64 offers_ = 0;
  Heap<Offer> ready_;                       // leaves
  Heap<Offer> blocked_;                     // parents of skipped blocks
  std::unordered_map<u32, u32> skipped_;    // parent -> present children that the caller skipped
};

}  // namespace kvist::value
