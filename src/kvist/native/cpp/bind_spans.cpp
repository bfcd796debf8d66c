// Python binding of the index of cached text; `kvist/native/span_twin.py` is its specification.
#include <nanobind/nanobind.h>

#include <string_view>
#include <unordered_set>
#include <vector>

#include "bind.hpp"
#include "span_find.hpp"

namespace nb = nanobind;

namespace {

using kvist::View;
using kvist::spans::Finder;
using kvist::spans::i64;
using kvist::spans::kKeyBytes;
using kvist::spans::kScopeBytes;
using kvist::spans::SpanTable;
using kvist::spans::u32;
using kvist::spans::u64;
using kvist::spans::u8;

// The table with what a lookup may leave behind.
struct Table {
  SpanTable table;
  std::size_t curtailed = 0;

  Table(i64 block_tokens, i64 most_blocks, i64 owners)
      : table(positive(block_tokens), positive(most_blocks), positive(owners)) {}

  static std::size_t positive(i64 number) {
    if (number < 1) throw nb::value_error("block_tokens, most_blocks and owners are at least 1");
    return static_cast<std::size_t>(number);
  }
};

const u8* fixed(nb::handle object, std::size_t bytes, const char* complaint) {
  if (!PyBytes_Check(object.ptr()) ||
      static_cast<std::size_t>(PyBytes_GET_SIZE(object.ptr())) != bytes) {
    throw nb::value_error(complaint);
  }
  return reinterpret_cast<const u8*>(PyBytes_AS_STRING(object.ptr()));
}

const u8* scope_bytes(nb::handle scope) { return fixed(scope, kScopeBytes, "a scope is 16 bytes"); }

const u8* parent_bytes(nb::handle parent) {
  return parent.is_none() ? nullptr : fixed(parent, kKeyBytes, "a key is 32 bytes");
}

// Copies of keys, so that they may be read without the GIL.
std::vector<u8> key_bytes(nb::handle keys) {
  const nb::object fast = nb::steal(PySequence_Fast(keys.ptr(), "keys is not a sequence"));
  if (!fast.is_valid()) throw nb::python_error();
  const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr()));
  PyObject** items = PySequence_Fast_ITEMS(fast.ptr());
  std::vector<u8> found(count * kKeyBytes);
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(&found[i * kKeyBytes], fixed(items[i], kKeyBytes, "a key is 32 bytes"), kKeyBytes);
  }
  return found;
}

bool has_twins(const std::vector<u8>& keys) {
  std::unordered_set<std::string_view> seen;
  for (std::size_t i = 0; i < keys.size(); i += kKeyBytes) {
    if (!seen.emplace(reinterpret_cast<const char*>(&keys[i]), kKeyBytes).second) return true;
  }
  return false;
}

template <typename Item>
std::size_t items(const View& view) {
  if (view.bytes() % sizeof(Item) != 0) throw nb::value_error("an array of another type");
  return view.bytes() / sizeof(Item);
}

template <typename Item>
const Item* data(const View& view) {
  return reinterpret_cast<const Item*>(view.data());
}

void check_fit(const Table& self, std::size_t keys, std::size_t tokens, std::size_t ends,
               std::size_t fingerprints) {
  if (tokens != keys * self.table.block_tokens() || ends != fingerprints) {
    throw nb::value_error("keys and tokens, or marks and fingerprints, do not fit together");
  }
}

std::size_t known(const Table& self, nb::handle keys, nb::handle tokens, std::size_t first_block,
                  nb::handle scope, nb::handle parent) {
  const std::vector<u8> named = key_bytes(keys);
  const View text(tokens);
  const std::size_t count = named.size() / kKeyBytes;
  check_fit(self, count, items<u32>(text), 0, 0);
  return self.table.known(named.data(), count, data<u32>(text), first_block, scope_bytes(scope),
                          parent_bytes(parent));
}

nb::bytes tail(const Table& self, nb::handle key, nb::handle scope, i64 tokens) {
  const SpanTable& table = self.table;
  const u8* wanted = scope_bytes(scope);
  std::vector<u32> reversed;
  u32 id = table.find_block(fixed(key, kKeyBytes, "a key is 32 bytes"));
  while (id != kvist::spans::kNone && tokens > 0 &&
         std::memcmp(table.block(id).scope, wanted, kScopeBytes) == 0) {
    for (std::size_t i = table.block_tokens(); i-- > 0 && tokens > 0; --tokens) {
      reversed.push_back(table.text(id)[i]);
    }
    id = table.block(id).parent;
  }
  const std::vector<u32> found(reversed.rbegin(), reversed.rend());
  return nb::bytes(reinterpret_cast<const char*>(found.data()), found.size() * sizeof(u32));
}

std::size_t put(Table& self, nb::handle keys, nb::handle tokens, std::size_t first_block,
                nb::handle scope, nb::handle parent, nb::handle ends, nb::handle fingerprints) {
  const std::vector<u8> named = key_bytes(keys);
  const u8* wanted = scope_bytes(scope);
  const u8* before = parent_bytes(parent);
  const View text(tokens), places(ends), hashes(fingerprints);
  const std::size_t count = named.size() / kKeyBytes, marks = items<i64>(places);
  check_fit(self, count, items<u32>(text), marks, items<u64>(hashes));
  if (has_twins(named)) throw nb::value_error("a key comes twice");
  const nb::gil_scoped_release release;
  return self.table.put(named.data(), count, data<u32>(text), first_block, wanted, before,
                        data<i64>(places), data<u64>(hashes), marks);
}

std::size_t drop(Table& self, nb::handle keys) {
  const std::vector<u8> named = key_bytes(keys);
  std::size_t dropped = 0;
  for (std::size_t i = 0; i < named.size(); i += kKeyBytes) dropped += self.table.drop(&named[i]);
  return dropped;
}

nb::list find(Table& self, nb::handle tokens, nb::handle ends, nb::handle fingerprints,
              nb::handle scope, i64 least_tokens, u32 alternatives, i64 budget_tokens) {
  const u8* wanted = scope_bytes(scope);
  const View text(tokens), places(ends), hashes(fingerprints);
  const std::size_t count = items<u32>(text), marks = items<i64>(places);
  check_fit(self, 0, 0, marks, items<u64>(hashes));
  const i64* at = data<i64>(places);
  for (std::size_t i = 0; i < marks; ++i) {
    if (at[i] < 0 || at[i] >= static_cast<i64>(count)) {
      throw nb::value_error("a mark lies outside the prompt");
    }
  }
  Finder finder(self.table, data<u32>(text), count);
  {
    const nb::gil_scoped_release release;
    finder.look_up(at, data<u64>(hashes), marks, wanted, least_tokens, budget_tokens);
    finder.choose(alternatives);
  }
  self.curtailed += finder.curtailed;
  nb::list found;
  for (const auto& run : finder.runs) {
    const nb::object held = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(run.blocks)));
    if (!held.is_valid()) throw nb::python_error();
    for (std::size_t n = 0; n < run.blocks; ++n) {
      const auto& block = self.table.block(finder.paths[run.path + n]);
      nb::bytes key(block.key, kKeyBytes);
      PyTuple_SET_ITEM(held.ptr(), static_cast<Py_ssize_t>(n), key.release().ptr());
    }
    found.append(nb::make_tuple(run.start, run.stop, run.source, held));
  }
  return found;
}

}  // namespace

void bind_spans(nb::module_& m) {
  nb::class_<Table>(m, "SpanTable")
      .def(nb::init<i64, i64, i64>(), nb::arg("block_tokens"), nb::arg("most_blocks"),
           nb::arg("owners"))
      .def("__len__", [](const Table& self) { return self.table.size(); })
      .def("known", &known, nb::arg("keys"), nb::arg("tokens"), nb::arg("first_block"),
           nb::arg("scope"), nb::arg("parent").none())
      .def("tail", &tail, nb::arg("key"), nb::arg("scope"), nb::arg("tokens"))
      .def("put", &put, nb::arg("keys"), nb::arg("tokens"), nb::arg("first_block"),
           nb::arg("scope"), nb::arg("parent").none(), nb::arg("ends"), nb::arg("fingerprints"))
      .def("drop", &drop, nb::arg("keys"))
      .def("clear", [](Table& self) { self.table.clear(); })
      .def("find", &find, nb::arg("tokens"), nb::arg("ends"), nb::arg("fingerprints"),
           nb::arg("scope"), nb::arg("least_tokens"), nb::arg("alternatives"),
           nb::arg("budget_tokens"))
      .def_prop_ro("marks", [](const Table& self) { return self.table.marks(); })
      .def_prop_ro("evicted_blocks", [](const Table& self) { return self.table.evicted(); })
      .def_prop_ro("crowded_marks", [](const Table& self) { return self.table.crowded(); })
      .def_prop_ro("curtailed_lookups", [](const Table& self) { return self.curtailed; })
      .def_prop_ro("memory_bytes", [](const Table& self) { return self.table.memory_bytes(); });
}
