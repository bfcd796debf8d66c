// Python binding of the table of owners; `kvist/native/owner_twin.py` is its specification.
//
// A table has a lock of its own, under which no Python code runs and the GIL is not asked for: so
// `reach_many` can walk without the GIL while other threads hold it and wait for the lock. What takes
// long changes the table without the GIL, too, and hashes before it takes the lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "hash_chain.hpp"
#include "owner_reach.hpp"

namespace nb = nanobind;

namespace {

using namespace kvist::owners;
using kvist::View;

constexpr std::size_t kAhead = 16;      // look-ups whose cache misses overlap
constexpr std::size_t kKeysAhead = 96;  // far enough that the next page's address is there, too
constexpr std::size_t kManyKeys = 256;  // take longer than to give up the GIL and get it back
constexpr std::size_t kManyTokens = 1024;
constexpr std::int64_t kMostSources = kNobody, kMostTiers = 1 << 16;

struct LockedTable {
  LockedTable(std::size_t most_keys, std::size_t most_names) : owners(most_keys, most_names) {}
  OwnerTable owners;
  std::mutex lock;
};
using Locked = std::lock_guard<std::mutex>;

Key key_of(PyObject* key) {
  if (!PyBytes_Check(key) || PyBytes_GET_SIZE(key) < static_cast<Py_ssize_t>(kTagBytes)) {
    throw nb::value_error("a key is 16 bytes or more");
  }
  return {reinterpret_cast<const u8*>(PyBytes_AS_STRING(key)),
          static_cast<std::size_t>(PyBytes_GET_SIZE(key))};
}

// Gives up the GIL while it lives, if that is worth it.
class Released {
 public:
  explicit Released(bool is_long) {
    if (is_long) unlocked_.emplace();
  }

 private:
  std::optional<nb::gil_scoped_release> unlocked_;
};

// A sequence of keys, held while this lives; each is checked as it is taken.
class Keys {
 public:
  explicit Keys(nb::handle keys)
      : Keys(nb::steal(PySequence_Fast(keys.ptr(), "keys is not a sequence"))) {}

  // Keys that stay what they are while other threads run Python code.
  static Keys fixed(nb::handle keys) { return Keys(nb::steal(PySequence_Tuple(keys.ptr()))); }

  std::size_t size() const { return count_; }
  Key operator[](std::size_t i) const { return key_of(items_[i]); }
  void announce(std::size_t i) const {
    if (i < count_) __builtin_prefetch(PyBytes_AS_STRING(items_[i]));
  }
  std::vector<Key> all() const {
    std::vector<Key> out;
    out.reserve(count_);
    for (std::size_t i = 0; i < count_; ++i) {
      announce(i + kKeysAhead);
      out.push_back(key_of(items_[i]));
    }
    return out;
  }

 private:
  explicit Keys(nb::object fast) : fast_(std::move(fast)) {
    if (!fast_.is_valid()) throw nb::python_error();
    count_ = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast_.ptr()));
    items_ = PySequence_Fast_ITEMS(fast_.ptr());
  }

  nb::object fast_;
  std::size_t count_ = 0;
  PyObject** items_ = nullptr;
};

Owner owner_of(std::int64_t source, std::int64_t tiers) {
  if (source < 0 || source >= kMostSources || tiers <= 0 || tiers >= kMostTiers) {
    throw nb::value_error("a source is below 65535, tiers have 16 bits and at least one");
  }
  return {static_cast<u16>(source), static_cast<u16>(tiers)};
}

// Calls for each key, and tells the table of keys that come soon, so that cache misses overlap.
template <typename Call>
void each_key(LockedTable& table, Owner owner, nb::handle sequence, Call call) {
  const Keys held = Keys::fixed(sequence);
  const std::vector<Key> keys = held.all();
  const Released released(keys.size() >= kManyKeys);
  const Locked locked(table.lock);
  const auto announce = [&](std::size_t i) {
    if (i >= keys.size()) return;
    table.owners.announce(keys[i].data);
    table.owners.announce_name(owner.source, keys[i].data);
  };
  for (std::size_t i = 0; i < kAhead; ++i) announce(i);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    announce(i + kAhead);
    call(keys[i]);
  }
}

void add_to(LockedTable& table, std::int64_t source, std::int64_t tiers, nb::handle keys) {
  const Owner owner = owner_of(source, tiers);
  u32 last = kNone;
  each_key(table, owner, keys, [&](Key key) { table.owners.add(owner, key, last); });
}

void remove_from(LockedTable& table, std::int64_t source, std::int64_t tiers, nb::handle keys) {
  const Owner owner = owner_of(source, tiers);
  each_key(table, owner, keys, [&](Key key) { table.owners.remove(owner, key); });
}

bool add_chain(LockedTable& table, std::int64_t source, std::int64_t tiers, nb::handle sequence,
               nb::handle parent, nb::bytes seed, nb::handle tokens, std::int64_t block_tokens) {
  const Owner owner = owner_of(source, tiers);
  const Keys held = Keys::fixed(sequence);
  const std::vector<Key> names = held.all();
  const View view(tokens);
  if (seed.size() != kKeyBytes) throw nb::value_error("seed is not 32 bytes");
  if (block_tokens < 1 || view.bytes() != names.size() * static_cast<u64>(block_tokens) * 4) {
    throw nb::value_error("tokens are 4 bytes each and block_tokens for each name");
  }
  std::optional<Key> above;
  if (!parent.is_none()) above = key_of(parent.ptr());

  const Released released(names.size() * static_cast<u64>(block_tokens) >= kManyTokens);
  std::array<u8, kKeyBytes> start;
  std::memcpy(start.data(), seed.c_str(), kKeyBytes);
  if (above.has_value()) {
    const Locked locked(table.lock);
    const u8* key = table.owners.key_held(owner.source, *above);
    if (key == nullptr) return false;
    std::memcpy(start.data(), key, kKeyBytes);
  }
  std::vector<u8> keys(names.size() * kKeyBytes);
  kvist::hash_chain(start.data(), view.data(), names.size(),
                    static_cast<std::size_t>(block_tokens), {}, keys.data());
  const Locked locked(table.lock);
  for (std::size_t i = 0; i < names.size(); ++i) {
    table.owners.announce(&keys[i * kKeyBytes]);
    table.owners.announce_name(owner.source, names[i].data);
  }
  u32 last = kNone;
  for (std::size_t i = 0; i < names.size(); ++i) {
    table.owners.add_named(owner, {&keys[i * kKeyBytes], kKeyBytes}, names[i], last);
  }
  return true;
}

void drop(LockedTable& table, std::int64_t source) {
  const Owner owner = owner_of(source, 1);
  const Locked locked(table.lock);
  table.owners.drop(owner.source);
}

void fade(LockedTable& table, std::int64_t tiers) {
  const Owner owner = owner_of(0, tiers);
  const Locked locked(table.lock);
  table.owners.fade(owner.tiers);
}

nb::list listed(const Owners& owners) {
  nb::list out;
  for (const Owner& o : owners) out.append(nb::make_tuple(o.source, o.tiers));
  return out;
}

Owners owners_of(LockedTable& table, const u8* tag) {
  const Locked locked(table.lock);
  u32 last = kNone;
  return table.owners.owners(table.owners.set_of(tag, last));
}

nb::list find(LockedTable& table, nb::handle key) {
  return listed(owners_of(table, key_of(key.ptr()).data));
}

// Walks along keys as long as anybody goes on. `key_at(i)` may throw; it needs no GIL, since bytes
// never change.
template <typename KeyAt, typename Announce>
void walk(OwnerTable& owners, Reach& reach, std::size_t count, KeyAt key_at, Announce announce) {
  for (std::size_t i = 0; i < count; ++i) {
    announce(i + kKeysAhead);
    if (reach.searched() && i + 2 < count) owners.announce(key_at(i + 2));
    if (!reach.step(owners, key_at(i))) return;
  }
}

using Readers = nb::ndarray<const u16, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;

Reach new_reach(const Readers& readers, const std::vector<u16>& levels) {
  if (levels.empty() || levels.size() > kMostLevels) throw nb::value_error("levels are 1 to 8");
  return {reinterpret_cast<const Reader*>(readers.data()), readers.shape(0), levels};
}

// Readers that have anything: their place and a run for each level.
nb::list reached(Reach& reach, std::size_t levels) {
  const std::vector<u32>& runs = reach.finish();
  nb::list out;
  for (std::size_t first = 0; first < runs.size(); first += levels) {
    const u32* run = &runs[first];
    if (std::all_of(run, run + levels, [](u32 r) { return r == 0; })) continue;
    nb::object tuple = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(levels + 1)));
    PyTuple_SET_ITEM(tuple.ptr(), 0, PyLong_FromSize_t(first / levels));
    for (std::size_t n = 0; n < levels; ++n) {
      PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(n + 1), PyLong_FromSize_t(run[n]));
    }
    out.append(tuple);
  }
  return out;
}

// Holds the GIL: it takes some ten microseconds, and where nobody has the first key, next to nothing.
nb::list reach(LockedTable& table, nb::handle sequence, const Readers& readers,
               const std::vector<u16>& levels) {
  const Keys keys(sequence);
  Reach found = new_reach(readers, levels);
  {
    const Locked locked(table.lock);
    walk(table.owners, found, keys.size(), [&](std::size_t i) { return keys[i].data; },
         [&](std::size_t i) { keys.announce(i); });
  }
  return reached(found, levels.size());
}

nb::list reach_many(LockedTable& table, nb::handle requests, const Readers& readers,
                    const std::vector<u16>& levels) {
  std::vector<Keys> prefixes;
  std::vector<Reach> found;
  for (nb::handle sequence : requests) {
    prefixes.push_back(Keys::fixed(sequence));
    found.push_back(new_reach(readers, levels));
  }
  {
    const nb::gil_scoped_release unlocked;
    const Locked locked(table.lock);
    for (std::size_t r = 0; r < prefixes.size(); ++r) {
      walk(table.owners, found[r], prefixes[r].size(),
           [&](std::size_t i) { return prefixes[r][i].data; },
           [&](std::size_t i) { prefixes[r].announce(i); });
    }
  }
  nb::list out;
  for (Reach& one : found) out.append(reached(one, levels.size()));
  return out;
}

// As `reach`, each source that has the first key being a reader, at one level.
nb::list runs(LockedTable& table, nb::handle sequence, std::int64_t tiers) {
  const u16 level = owner_of(0, tiers).tiers;
  const Keys keys(sequence);
  if (keys.size() == 0) return {};
  std::vector<Reader> readers;
  for (const Owner& o : owners_of(table, keys[0].data)) readers.push_back({o.source, kNobody});
  Reach found(readers.data(), readers.size(), {level});
  {
    const Locked locked(table.lock);
    walk(table.owners, found, keys.size(), [&](std::size_t i) { return keys[i].data; },
         [&](std::size_t i) { keys.announce(i); });
  }
  nb::list out;
  const std::vector<u32>& reached = found.finish();
  for (std::size_t i = 0; i < readers.size(); ++i) {
    if (reached[i] != 0) out.append(nb::make_tuple(readers[i].first, reached[i]));
  }
  return out;
}

nb::object items(LockedTable& table) {
  std::vector<std::pair<std::array<u8, kTagBytes>, Owners>> found;
  {
    const Locked locked(table.lock);
    table.owners.each([&](const u8* key, const Owners& owners) {
      found.emplace_back().second = owners;
      std::memcpy(found.back().first.data(), key, kTagBytes);
    });
  }
  nb::list out;
  for (const auto& [tag, owners] : found) {
    const nb::bytes written(reinterpret_cast<const char*>(tag.data()), kTagBytes);
    out.append(nb::make_tuple(written, listed(owners)));
  }
  return nb::steal(PyObject_GetIter(out.ptr()));
}

constexpr auto kLimit = static_cast<std::int64_t>(kMostEntries);

void construct(LockedTable* self, std::int64_t most_keys, std::int64_t most_names) {
  if (most_keys < 1 || most_names < 1 || most_keys > kLimit || most_names > kLimit - most_keys) {
    throw nb::value_error("most_keys and most_names are 1 or more, and below 2**25 together");
  }
  new (self) LockedTable(static_cast<std::size_t>(most_keys), static_cast<std::size_t>(most_names));
}

// What a count of the table is now.
template <auto Count>
auto counted(LockedTable& table) {
  const Locked locked(table.lock);
  return (table.owners.*Count)();
}

}  // namespace

void bind_owners(nb::module_& m) {
  nb::class_<LockedTable>(m, "OwnerTable")
      .def("__init__", &construct, nb::arg("most_keys"), nb::arg("most_names") = 1 << 24)
      .def("__len__", &counted<&OwnerTable::size>)
      .def("add", &add_to, nb::arg("source"), nb::arg("tiers"), nb::arg("keys"))
      .def("remove", &remove_from, nb::arg("source"), nb::arg("tiers"), nb::arg("keys"))
      .def("add_chain", &add_chain, nb::arg("source"), nb::arg("tiers"), nb::arg("names"),
           nb::arg("parent").none(), nb::arg("seed"), nb::arg("tokens"), nb::arg("block_tokens"))
      .def("drop", &drop, nb::arg("source"))
      .def("fade", &fade, nb::arg("tiers"))
      .def("find", &find, nb::arg("key"))
      .def("runs", &runs, nb::arg("keys"), nb::arg("tiers") = kMostTiers - 1)
      .def("reach", &reach, nb::arg("keys"), nb::arg("readers").noconvert(), nb::arg("levels"))
      .def("reach_many", &reach_many, nb::arg("requests"), nb::arg("readers").noconvert(),
           nb::arg("levels"))
      .def("items", &items)
      .def_prop_ro("evicted", &counted<&OwnerTable::evicted>)
      .def_prop_ro("names", &counted<&OwnerTable::names>)
      .def_prop_ro("memory_bytes", &counted<&OwnerTable::memory_bytes>);
}
