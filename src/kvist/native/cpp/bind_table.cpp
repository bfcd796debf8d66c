// Python binding of the segment log's index; `kvist/native/table_twin.py` is its specification.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <tuple>
#include <vector>

#include "bind.hpp"
#include "key_table.hpp"

namespace nb = nanobind;

namespace {

using kvist::table::Entry;
using kvist::table::kHot;
using kvist::table::kKeyBytes;
using kvist::table::kTombstone;
using kvist::table::KeyTable;
using kvist::table::u64;
using kvist::table::u8;

// One entry of a segment footer; see kvist/tiers/ssd/segment.py.
struct FooterEntry {
  u8 key[32], parent[32], keyspace[32];
  u64 offset, raw_bytes, stored_bytes, sequence;
  std::uint16_t kind, has_parent;
  std::uint32_t zero;
};
static_assert(sizeof(FooterEntry) == 136);

constexpr std::size_t kGroup = 16;  // look-ups whose cache misses overlap
constexpr u64 kPage = 4096;
constexpr u64 kMostBytes = u64{1} << 62;
constexpr std::uint16_t kBlock = 1, kRemoved = 2;

using Place = std::tuple<u64, u64, u64, u64, u64>;

const u8* key_bytes(nb::handle key) {
  if (!PyBytes_Check(key.ptr()) || PyBytes_GET_SIZE(key.ptr()) != kKeyBytes) return nullptr;
  return reinterpret_cast<const u8*>(PyBytes_AS_STRING(key.ptr()));
}

const u8* demand_key(nb::handle key) {
  const u8* bytes = key_bytes(key);
  if (bytes == nullptr) throw nb::value_error("a key is 32 bytes");
  return bytes;
}

Place place(const KeyTable& table, const Entry& e) {
  return {table.segment_of(e), e.offset, e.raw_bytes, e.stored_bytes, e.sequence};
}

std::optional<Place> get(KeyTable& table, nb::handle key) {
  const u8* bytes = key_bytes(key);
  const Entry* entry = bytes != nullptr ? table.find(bytes) : nullptr;
  if (entry == nullptr) return std::nullopt;
  return place(table, *entry);
}

bool contains(KeyTable& table, nb::handle key) {
  const u8* bytes = key_bytes(key);
  return bytes != nullptr && table.find(bytes) != nullptr;
}

// Calls `tell(i, present)` for each key in order, until it returns false.
template <typename Tell>
void look_up(KeyTable& table, nb::handle keys, Tell tell) {
  const nb::object fast = nb::steal(PySequence_Fast(keys.ptr(), "keys is not a sequence"));
  if (!fast.is_valid()) throw nb::python_error();
  const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr()));
  PyObject** items = PySequence_Fast_ITEMS(fast.ptr());
  const u8* bytes[kGroup];
  std::size_t homes[kGroup];
  for (std::size_t from = 0; from < count; from += kGroup) {
    const std::size_t group = std::min(count - from, kGroup);
    const std::size_t ahead = std::min(count, from + 2 * kGroup);
    for (std::size_t i = from + group; i < ahead; ++i) __builtin_prefetch(items[i]);
    for (std::size_t i = 0; i < group; ++i) {
      bytes[i] = key_bytes(items[from + i]);
      if (bytes[i] != nullptr) homes[i] = table.home(bytes[i]);
    }
    for (std::size_t i = 0; i < group; ++i) {
      if (bytes[i] != nullptr) table.announce(homes[i]);
    }
    for (std::size_t i = 0; i < group; ++i) {
      if (!tell(from + i, bytes[i] != nullptr && table.find(bytes[i]) != nullptr)) return;
    }
  }
}

std::size_t contains_run(KeyTable& table, nb::handle keys) {
  std::size_t run = 0;
  look_up(table, keys, [&](std::size_t, bool present) {
    run += present;
    return present;
  });
  return run;
}

nb::bytes present(KeyTable& table, nb::handle keys) {
  std::vector<char> found;
  look_up(table, keys, [&](std::size_t, bool here) {
    found.push_back(static_cast<char>(here));
    return true;
  });
  return nb::bytes(found.data(), found.size());
}

void put(KeyTable& table, nb::handle key, u64 segment, u64 offset, u64 raw_bytes,
         u64 stored_bytes, u64 sequence, bool tombstone) {
  table.put(demand_key(key), segment,
            {{}, sequence, offset, raw_bytes, stored_bytes, 0, 0, 0, tombstone ? kTombstone : 0});
}

bool fits(const FooterEntry& e, u64 frames_end) {
  if (e.offset < kPage || e.offset % kPage != 0 || e.offset >= frames_end) return false;
  if (e.stored_bytes > kMostBytes) return false;
  const u64 padded = (e.stored_bytes + kPage - 1) / kPage * kPage;
  return padded <= frames_end && e.offset + kPage + padded <= frames_end;
}

std::tuple<u64, u64> add_footer(KeyTable& table, nb::handle data, u64 segment, u64 frames_end) {
  const kvist::View view(data);
  if (view.bytes() % sizeof(FooterEntry) != 0) throw nb::value_error("a footer of odd length");
  const std::size_t count = view.bytes() / sizeof(FooterEntry);
  u64 first = count != 0 ? ~u64{0} : 0, last = 0;
  FooterEntry entry;
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(&entry, view.data() + i * sizeof entry, sizeof entry);
    if (entry.kind != kBlock && entry.kind != kRemoved) {
      throw nb::value_error("unknown frame kind in a segment footer");
    }
    if (!fits(entry, frames_end)) throw nb::value_error("a footer entry outside the frames");
    first = std::min(first, entry.sequence);
    last = std::max(last, entry.sequence);
  }
  table.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(&entry, view.data() + i * sizeof entry, sizeof entry);
    table.put(entry.key, segment,
              {{}, entry.sequence, entry.offset, entry.raw_bytes, entry.stored_bytes, 0, 0, 0,
               entry.kind == kRemoved ? kTombstone : 0});
  }
  return {first, last};
}

Entry* current(KeyTable& table, nb::handle key, u64 sequence) {
  Entry* entry = table.find(demand_key(key));
  return entry != nullptr && entry->sequence == sequence ? entry : nullptr;
}

bool touch(KeyTable& table, nb::handle key, u64 sequence) {
  Entry* entry = current(table, key, sequence);
  if (entry != nullptr) entry->flags |= kHot;
  return entry != nullptr;
}

bool drop(KeyTable& table, nb::handle key, u64 sequence) {
  if (current(table, key, sequence) == nullptr) return false;
  table.erase(demand_key(key));
  return true;
}

nb::list hot(KeyTable& table, u64 segment) {
  nb::list out;
  for (const auto id : table.members(segment)) {
    const Entry& e = table.at(id);
    if ((e.flags & kHot) == 0) continue;
    out.append(nb::make_tuple(nb::bytes(e.key, kKeyBytes), place(table, e)));
  }
  return out;
}

}  // namespace

void bind_table(nb::module_& m) {
  nb::class_<KeyTable>(m, "KeyTable")
      .def(nb::init<>())
      .def("__len__", &KeyTable::size)
      .def("__contains__", &contains, nb::arg("key"))
      .def("get", &get, nb::arg("key"))
      .def("contains_run", &contains_run, nb::arg("keys"))
      .def("present", &present, nb::arg("keys"))
      .def("put", &put, nb::arg("key"), nb::arg("segment"), nb::arg("offset"),
           nb::arg("raw_bytes"), nb::arg("stored_bytes"), nb::arg("sequence"),
           nb::kw_only(), nb::arg("tombstone") = false)
      .def("erase", [](KeyTable& t, nb::handle key) { t.erase(demand_key(key)); }, nb::arg("key"))
      .def("add_footer", &add_footer, nb::arg("entries"), nb::arg("segment"),
           nb::arg("frames_end"))
      .def("settle", &KeyTable::settle)
      .def("touch", &touch, nb::arg("key"), nb::arg("sequence"))
      .def("drop", &drop, nb::arg("key"), nb::arg("sequence"))
      .def("hot", &hot, nb::arg("segment"))
      .def("drop_segment", &KeyTable::drop_segment, nb::arg("segment"))
      .def("clear", &KeyTable::clear)
      .def_prop_ro("memory_bytes", &KeyTable::memory_bytes);
}
