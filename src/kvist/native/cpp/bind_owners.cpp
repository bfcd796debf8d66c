// Python binding of the directory's table; `kvist/native/owner_twin.py` is its specification.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <map>
#include <vector>

#include "bind.hpp"
#include "owner_table.hpp"

namespace nb = nanobind;

namespace {

using kvist::owners::kEmptySet;
using kvist::owners::kTagBytes;
using kvist::owners::Owner;
using kvist::owners::Owners;
using kvist::owners::OwnerTable;
using kvist::owners::u16;
using kvist::owners::u32;
using kvist::owners::u8;

constexpr std::size_t kAhead = 8;  // look-ups whose cache misses overlap
constexpr std::int64_t kMostSources = 1 << 16, kMostTiers = 1 << 8;

const u8* tag_of(PyObject* key) {
  if (!PyBytes_Check(key) || PyBytes_GET_SIZE(key) < static_cast<Py_ssize_t>(kTagBytes)) {
    throw nb::value_error("a key is 16 bytes or more");
  }
  return reinterpret_cast<const u8*>(PyBytes_AS_STRING(key));
}

// A sequence of keys, held while this lives; each is checked as it is taken.
class Keys {
 public:
  explicit Keys(nb::handle keys)
      : fast_(nb::steal(PySequence_Fast(keys.ptr(), "keys is not a sequence"))) {
    if (!fast_.is_valid()) throw nb::python_error();
    count_ = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast_.ptr()));
    items_ = PySequence_Fast_ITEMS(fast_.ptr());
  }
  std::size_t size() const { return count_; }
  const u8* operator[](std::size_t i) const { return tag_of(items_[i]); }
  void check() const {
    for (std::size_t i = 0; i < count_; ++i) tag_of(items_[i]);
  }

 private:
  nb::object fast_;
  std::size_t count_ = 0;
  PyObject** items_ = nullptr;
};

void demand(std::int64_t source, std::int64_t tiers) {
  if (source < 0 || source >= kMostSources || tiers <= 0 || tiers >= kMostTiers) {
    throw nb::value_error("a source has 16 bits, tiers 8 and at least one");
  }
}

// Tells the table of keys that come soon, so that their cache misses overlap.
void announce(const OwnerTable& table, const Keys& keys, std::size_t i) {
  if (i + kAhead < keys.size()) table.announce(keys[i + kAhead]);
}

void add_to(OwnerTable& table, std::int64_t source, std::int64_t tiers, nb::handle sequence) {
  demand(source, tiers);
  const Keys keys(sequence);
  keys.check();
  for (std::size_t i = 0; i < keys.size(); ++i) {
    announce(table, keys, i);
    table.add(static_cast<u16>(source), static_cast<u8>(tiers), keys[i]);
  }
}

void remove_from(OwnerTable& table, std::int64_t source, std::int64_t tiers, nb::handle sequence) {
  demand(source, tiers);
  const Keys keys(sequence);
  keys.check();
  for (std::size_t i = 0; i < keys.size(); ++i) {
    announce(table, keys, i);
    table.remove(static_cast<u16>(source), static_cast<u8>(tiers), keys[i]);
  }
}

void drop(OwnerTable& table, std::int64_t source) {
  demand(source, 1);
  table.drop(static_cast<u16>(source));
}

nb::list listed(const Owners& owners) {
  nb::list out;
  for (const Owner& o : owners) out.append(nb::make_tuple(o.source, o.tiers));
  return out;
}

nb::list find(OwnerTable& table, nb::handle key) { return listed(table.find(tag_of(key.ptr()))); }

// Sources that have every key so far; looked at anew only when the set changes.
nb::list runs(OwnerTable& table, nb::handle sequence) {
  const Keys keys(sequence);
  std::map<u16, std::size_t> reached;
  std::vector<u16> going, still;
  u32 last = kEmptySet;
  std::size_t i = 0;
  for (; i < keys.size(); ++i) {
    announce(table, keys, i);
    const u32 set = table.set_at(keys[i]);
    if (i != 0 && set == last) continue;
    last = set;
    still.clear();
    for (const Owner& o : table.owners(set)) {
      if (i == 0 || std::binary_search(going.begin(), going.end(), o.source)) {
        still.push_back(o.source);
      }
    }
    for (const u16 source : going) {
      if (!std::binary_search(still.begin(), still.end(), source)) reached[source] = i;
    }
    going.swap(still);
    if (going.empty()) break;
  }
  for (const u16 source : going) reached[source] = i;
  nb::list out;
  for (const auto& [source, run] : reached) out.append(nb::make_tuple(source, run));
  return out;
}

nb::object items(const OwnerTable& table) {
  nb::list out;
  table.each([&](const u8* tag, const Owners& owners) {
    out.append(nb::make_tuple(nb::bytes(reinterpret_cast<const char*>(tag), kTagBytes),
                              listed(owners)));
  });
  return nb::steal(PyObject_GetIter(out.ptr()));
}

void construct(OwnerTable* self, std::int64_t most_keys) {
  if (most_keys < 1) throw nb::value_error("most_keys is at least 1");
  new (self) OwnerTable(static_cast<std::size_t>(most_keys));
}

}  // namespace

void bind_owners(nb::module_& m) {
  nb::class_<OwnerTable>(m, "OwnerTable")
      .def("__init__", &construct, nb::arg("most_keys"))
      .def("__len__", &OwnerTable::size)
      .def("add", &add_to, nb::arg("source"), nb::arg("tiers"), nb::arg("keys"))
      .def("remove", &remove_from, nb::arg("source"), nb::arg("tiers"), nb::arg("keys"))
      .def("drop", &drop, nb::arg("source"))
      .def("find", &find, nb::arg("key"))
      .def("runs", &runs, nb::arg("keys"))
      .def("items", &items)
      .def_prop_ro("evicted", &OwnerTable::evicted)
      .def_prop_ro("memory_bytes", &OwnerTable::memory_bytes);
}
