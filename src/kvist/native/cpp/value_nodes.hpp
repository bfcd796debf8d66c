// Blocks of the value policy, present ones and ghosts, and what runs of them share.
//
// Nodes stand in chunks that never move and are found by key through an open-addressing array of
// u32 (linear probing, deletion by shifting back, at most 3/4 full). A forgotten node's place is
// taken again by a later one; who still has its number finds another `order` or another key.
#pragma once

#include <Python.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace kvist::value {

using i64 = std::int64_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr u32 kNone = 0xffffffff;

// The blocks whose last use was in one request, and the share of them that LRU still has.
struct Turn {
  i64 number;
  i64 blocks = 0;
  double share = 1.0;
  bool queued = true;
};

// Blocks used in the same stretch of time that wait for a next use, counted by class.
struct Cohort {
  Cohort(double began, std::size_t classes) : began_s(began), waiting(classes, 0.0) {}
  double began_s;
  std::shared_ptr<Cohort> into;  // the one it was merged into
  std::vector<double> waiting;
};

// What blocks used by one request share, if they were used equally often before.
struct Use {
  u32 cls;
  int uses;
  double last_s;
  std::shared_ptr<Cohort> cohort;
  std::shared_ptr<Turn> turn;
  u32 holders = 0;
};

class UsePtr {
 public:
  UsePtr() = default;
  explicit UsePtr(Use* use) : use_(use) { hold(); }
  UsePtr(const UsePtr& other) : use_(other.use_) { hold(); }
  UsePtr(UsePtr&& other) noexcept : use_(std::exchange(other.use_, nullptr)) {}
  UsePtr& operator=(UsePtr other) noexcept {
    std::swap(use_, other.use_);
    return *this;
  }
  ~UsePtr() {
    if (use_ != nullptr && --use_->holders == 0) delete use_;
  }
  Use* get() const { return use_; }
  Use* operator->() const { return use_; }
  explicit operator bool() const { return use_ != nullptr; }

 private:
  void hold() {
    if (use_ != nullptr) ++use_->holders;
  }
  Use* use_ = nullptr;
};

struct Node {
  PyObject* key = nullptr;  // null: forgotten
  Py_hash_t hash = 0;
  UsePtr use;
  i64 order = 0;  // of its entry; 0 while it is not ranked
  u32 parent = kNone;
  u32 children = 0;  // present ones
  u32 end = kNone;   // the group of which it may be an end
  u32 queued = 0;    // times in the queue of ghosts
  int weight = 0;    // the step of weights
  bool present = false;
};

inline bool same_key(PyObject* a, PyObject* b) {
  if (a == b) return true;
  const Py_ssize_t bytes = PyBytes_GET_SIZE(a);
  return bytes == PyBytes_GET_SIZE(b) &&
         std::memcmp(PyBytes_AS_STRING(a), PyBytes_AS_STRING(b), bytes) == 0;
}

class NodeTable {
 public:
  NodeTable() : slots_(kFirstSlots, kNone) {}
  NodeTable(const NodeTable&) = delete;
  NodeTable& operator=(const NodeTable&) = delete;
  ~NodeTable() {
    for (const u32 id : slots_) {
      if (id != kNone) Py_DECREF(at(id).key);
    }
  }

  Node& at(u32 id) { return chunks_[id / kChunk][id % kChunk]; }
  std::size_t size() const { return count_; }

  // Whether node `id`, if any, has this key.
  bool is(u32 id, PyObject* key) {
    return id != kNone && at(id).key != nullptr && same_key(at(id).key, key);
  }

  u32 find(PyObject* key, Py_hash_t hash) { return slots_[slot_of(key, hash)]; }

  // Adds a key that is absent.
  u32 add(PyObject* key, Py_hash_t hash) {
    if ((count_ + 1) * 4 > slots_.size() * 3) grow();
    const u32 id = allocate();
    Node& node = at(id);
    node = Node();
    Py_INCREF(key);
    node.key = key;
    node.hash = hash;
    slots_[slot_of(key, hash)] = id;
    ++count_;
    return id;
  }

  // Forgets a node. Its parent and use can still be asked for, until another takes its place.
  void erase(u32 id) {
    Node& node = at(id);
    std::size_t slot = slot_of(node.key, node.hash);
    const std::size_t mask = slots_.size() - 1;
    for (std::size_t i = (slot + 1) & mask; slots_[i] != kNone; i = (i + 1) & mask) {
      const std::size_t home = mix(at(slots_[i]).hash) & mask;
      if (((i - home) & mask) >= ((i - slot) & mask)) {
        slots_[slot] = slots_[i];
        slot = i;
      }
    }
    slots_[slot] = kNone;
    --count_;
    PyObject* const key = std::exchange(node.key, nullptr);
    free_.push_back(id);
    Py_DECREF(key);
  }

 private:
  static constexpr std::size_t kFirstSlots = 1024;
  static constexpr std::size_t kChunk = 1024;  // nodes

  static std::size_t mix(Py_hash_t hash) {
    return static_cast<std::size_t>((static_cast<u64>(hash) * 0x9e3779b97f4a7c15) >> 20);
  }

  // Where `key` is, or the empty slot where it would go.
  std::size_t slot_of(PyObject* key, Py_hash_t hash) {
    const std::size_t mask = slots_.size() - 1;
    std::size_t slot = mix(hash) & mask;
    for (; slots_[slot] != kNone; slot = (slot + 1) & mask) {
      const Node& node = at(slots_[slot]);
      if (node.hash == hash && same_key(node.key, key)) break;
    }
    return slot;
  }

  void grow() {
    std::vector<u32> old(slots_.size() * 2, kNone);
    old.swap(slots_);
    const std::size_t mask = slots_.size() - 1;
    for (const u32 id : old) {
      if (id == kNone) continue;
      std::size_t slot = mix(at(id).hash) & mask;
      while (slots_[slot] != kNone) slot = (slot + 1) & mask;
      slots_[slot] = id;
    }
  }

  u32 allocate() {
    if (free_.empty()) {
      const u32 first = static_cast<u32>(chunks_.size() * kChunk);
      chunks_.push_back(std::make_unique<Node[]>(kChunk));
      for (u32 i = kChunk; i-- > 0;) free_.push_back(first + i);
    }
    const u32 id = free_.back();
    free_.pop_back();
    return id;
  }

  std::vector<std::unique_ptr<Node[]>> chunks_;
  std::vector<u32> free_;
  std::vector<u32> slots_;
  std::size_t count_ = 0;
};

}  // namespace kvist::value
