// Python bindings of the hot paths; `kvist/native/twin.py` is the specification of each.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <functional>
#include <string_view>
#include <vector>

#include "bind.hpp"
#include "hash_blake3.hpp"
#include "hash_chain.hpp"
#include "hash_xxh3.hpp"
#include "msgpack_tokens.hpp"
#include "pages.hpp"

namespace nb = nanobind;

namespace {

using kvist::xxh3::u8;
using u32 = std::uint32_t;

constexpr std::size_t kKeyBytes = kvist::kChainKeyBytes;
constexpr std::int64_t kMaxThreads = 64;

using kvist::View;

nb::bytes digest(nb::handle data) {
  const View view(data);
  u8 out[kKeyBytes];
  {
    nb::gil_scoped_release unlocked;
    kvist::blake3::digest(view.data(), view.bytes(), out);
  }
  return nb::bytes(out, kKeyBytes);
}

// What each variant of the compression makes of data; for parity tests.
nb::list digest_variants(nb::handle data) {
  const View view(data);
  nb::list out;
  for (const kvist::blake3::Compress compress : kvist::blake3::compress_variants()) {
    u8 digest[kKeyBytes];
    kvist::blake3::digest_with(compress, view.data(), view.bytes(), digest);
    out.append(nb::bytes(digest, kKeyBytes));
  }
  return out;
}

std::uint64_t checksum(nb::handle data) {
  const View view(data);
  nb::gil_scoped_release unlocked;
  return kvist::xxh3::checksum(view.data(), view.bytes());
}

std::uint64_t copy_checksum(nb::handle dst, nb::handle src) {
  const View to(dst), from(src);
  if (to.readonly()) throw nb::buffer_error("dst is read-only");
  if (to.bytes() != from.bytes()) throw nb::value_error("dst and src differ in length");
  const std::less<const u8*> before;
  if (before(to.data(), from.data() + from.bytes()) &&
      before(from.data(), to.data() + to.bytes())) {
    throw nb::value_error("dst and src overlap");
  }
  nb::gil_scoped_release unlocked;
  return kvist::xxh3::copy_checksum(to.data(), from.data(), from.bytes());
}

// What each variant of the hot loop makes of data and of a copy of it; for parity tests.
std::vector<std::uint64_t> checksum_variants(nb::handle data) {
  const View view(data);
  std::vector<u8> copy(view.bytes() + 64);
  std::vector<std::uint64_t> out;
  if (view.bytes() <= 240) return out;
  using kvist::xxh3::Copying;
  for (const auto loops : kvist::xxh3::loop_variants<Copying::kNone>()) {
    out.push_back(kvist::xxh3::Running(view.data(), view.bytes(), loops).finish());
  }
  for (const bool stream : {false, true}) {
    // Streams need an aligned place.
    u8* const place = copy.data() + (64 - reinterpret_cast<std::uintptr_t>(copy.data()) % 64) % 64;
    for (const auto loops : stream ? kvist::xxh3::loop_variants<Copying::kStream>()
                                   : kvist::xxh3::loop_variants<Copying::kStore>()) {
      std::fill(copy.begin(), copy.end(), u8{0});
      kvist::xxh3::copy_checksum_with(loops, place, view.data(), view.bytes());
      kvist::xxh3::end_streams();
      out.push_back(kvist::xxh3::checksum(place, view.bytes()));
    }
  }
  return out;
}

using TokenArray = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Whether an int is stored in one piece, and which it is then: what nearly every token is.
inline bool read_compact(PyObject* number, long long& value) {
#if PY_VERSION_HEX >= 0x030C0000
  const auto* as_int = reinterpret_cast<const PyLongObject*>(number);
  if (!PyUnstable_Long_IsCompact(as_int)) return false;
  value = PyUnstable_Long_CompactValue(as_int);
  return true;
#else
  if (Py_SIZE(number) != 1) return false;
  value = reinterpret_cast<const PyLongObject*>(number)->ob_digit[0];
  return true;
#endif
}

// The first `count` tokens of a sequence of integers.
std::vector<std::uint32_t> read_tokens(PyObject* const* items, std::size_t count) {
  std::vector<std::uint32_t> out(count);
  for (std::size_t i = 0; i < count; ++i) {
    nb::object index;  // of what is no int, but stands for one
    PyObject* number = items[i];
    long long token = 0;
    int overflow = 0;
    if (!PyLong_CheckExact(number)) {
      index = nb::steal(PyNumber_Index(number));
      if (!index.is_valid()) throw nb::python_error();
      number = index.ptr();
    }
    if (!read_compact(number, token)) token = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow != 0 || token < 0 || token > 0xFFFFFFFFLL) {
      PyErr_SetString(PyExc_OverflowError, "a token is not in the range of u32");
      throw nb::python_error();
    }
    out[i] = static_cast<std::uint32_t>(token);
  }
  return out;
}

// Extra bytes of each block; empty where there are none. Borrowed from `extras`' values, which
// `keep` holds.
std::vector<std::string_view> read_extras(nb::handle extras, std::size_t blocks, nb::list& keep) {
  std::vector<std::string_view> out;
  if (extras.is_none()) return out;
  out.resize(blocks);
  for (nb::handle item : extras.attr("items")()) {
    std::int64_t index = 0;
    if (!nb::try_cast(nb::handle(item[0]), index) || !nb::isinstance<nb::bytes>(item[1])) {
      throw nb::type_error("extras does not map int to bytes");
    }
    const auto value = nb::borrow<nb::bytes>(item[1]);
    if (index < 0 || static_cast<std::size_t>(index) >= blocks) continue;
    keep.append(value);
    out[static_cast<std::size_t>(index)] = std::string_view(value.c_str(), value.size());
  }
  return out;
}

nb::bytes unpack_tokens(nb::handle packed) {
  const View view(packed);
  std::vector<std::uint32_t> tokens;
  if (!kvist::unpack_tokens(view.data(), view.bytes(), tokens)) {
    throw nb::value_error("not a MessagePack array of u32");
  }
  return nb::bytes(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(u32));
}

// The key of a block as indexes know it, of what an engine calls it.
PyObject* block_key(PyObject* hash) {
  constexpr Py_ssize_t kShort = 16;
  char key[kShort] = {};
  if (PyBytes_Check(hash)) {
    const Py_ssize_t size = PyBytes_GET_SIZE(hash);
    if (size >= kShort) return Py_NewRef(hash);
    std::memcpy(key, PyBytes_AS_STRING(hash), static_cast<std::size_t>(size));
  } else if (PyLong_Check(hash)) {
    const std::uint64_t number = PyLong_AsUnsignedLongLongMask(hash);
    for (int i = 0; i < 8; ++i) key[i] = static_cast<char>(number >> (56 - 8 * i));
  } else {
    PyErr_SetString(PyExc_TypeError, "a block hash is bytes or int");
    return nullptr;
  }
  return PyBytes_FromStringAndSize(key, kShort);
}

nb::object block_keys(nb::list hashes) {
  const auto count = static_cast<Py_ssize_t>(hashes.size());
  nb::object out = nb::steal(PyTuple_New(count));
  if (!out.is_valid()) throw nb::python_error();
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* key = block_key(PyList_GET_ITEM(hashes.ptr(), i));
    if (key == nullptr) throw nb::python_error();
    PyTuple_SET_ITEM(out.ptr(), i, key);
  }
  return out;
}

nb::list chain_keys(nb::bytes seed, nb::handle tokens, std::int64_t block_tokens,
                    nb::handle extras) {
  if (seed.size() != kKeyBytes) throw nb::value_error("seed is not 32 bytes");
  if (block_tokens < 1) throw nb::value_error("block_tokens is below 1");
  const auto width = static_cast<std::size_t>(block_tokens);

  TokenArray array;
  std::vector<std::uint32_t> list;
  const std::uint32_t* values = nullptr;
  std::size_t blocks = 0;
  if (nb::try_cast<TokenArray>(tokens, array, false)) {
    blocks = array.shape(0) / width;
    values = array.data();
  } else {
    const nb::object fast = nb::steal(PySequence_Fast(tokens.ptr(), "tokens is not a sequence"));
    if (!fast.is_valid()) throw nb::python_error();
    blocks = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr())) / width;
    list = read_tokens(PySequence_Fast_ITEMS(fast.ptr()), blocks * width);
    values = list.data();
  }
  nb::list keep;
  const auto extra = read_extras(extras, blocks, keep);
  std::vector<u8> keys(blocks * kKeyBytes);
  {
    nb::gil_scoped_release unlocked;
    kvist::hash_chain(reinterpret_cast<const u8*>(seed.c_str()),
                      reinterpret_cast<const u8*>(values), blocks, width, extra, keys.data());
  }
  nb::object out = nb::steal(PyList_New(static_cast<Py_ssize_t>(blocks)));
  if (!out.is_valid()) throw nb::python_error();
  for (std::size_t i = 0; i < blocks; ++i) {
    const auto* key = reinterpret_cast<const char*>(keys.data() + i * kKeyBytes);
    PyObject* bytes = PyBytes_FromStringAndSize(key, kKeyBytes);
    if (bytes == nullptr) throw nb::python_error();
    PyList_SET_ITEM(out.ptr(), static_cast<Py_ssize_t>(i), bytes);
  }
  return nb::borrow<nb::list>(out);
}

template <typename T, std::size_t Dims>
using Array = nb::ndarray<const T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

// Validity inside the map is PageMap's promise; what memory safety rests on is checked again.
void move(nb::handle direction, const Array<std::uint64_t, 1>& slots,
          const Array<std::int64_t, 2>& pages, nb::handle page_map, std::int64_t threads,
          std::vector<std::uint64_t>* sums) {
  const auto layers = nb::cast<Array<std::uint64_t, 1>>(page_map.attr("layers"), false);
  const auto tables = nb::cast<Array<std::uint32_t, 2>>(page_map.attr("tables"), false);
  const auto offsets = nb::cast<Array<std::int64_t, 2>>(page_map.attr("head_offsets"), false);
  const auto size = [&](const char* name) {
    const auto value = nb::cast<std::int64_t>(page_map.attr(name));
    if (value < 0) throw nb::value_error("a size in the page map is negative");
    return static_cast<std::size_t>(value);
  };
  kvist::pages::Map map{
      layers.data(), layers.shape(0), nb::cast<std::int64_t>(page_map.attr("page_stride_bytes")),
      tables.data(), tables.shape(0), tables.shape(1), offsets.data(), offsets.shape(1),
      size("unit_bytes"), size("block_heads"), size("first_head"), size("page_tokens")};
  if (offsets.shape(0) != map.kinds || map.units == 0 || map.unit_bytes == 0 ||
      map.first_head + map.heads > map.block_heads) {
    throw nb::value_error("the page map contradicts itself");
  }
  if (threads < 1) throw nb::value_error("threads is below 1");
  if (pages.shape(0) != slots.shape(0)) throw nb::value_error("slots and pages differ in length");
  const std::int64_t* ids = pages.data();
  if (std::any_of(ids, ids + pages.size(), [](std::int64_t id) { return id < -1; })) {
    throw nb::value_error("a page id is below -1");
  }
  const std::string_view way = nb::cast<const char*>(direction.attr("value"));
  if (way != "gather" && way != "scatter") throw nb::value_error("no such direction");
  const kvist::pages::Job job{way == "gather", slots.data(), ids, slots.shape(0), pages.shape(1)};
  nb::gil_scoped_release unlocked;
  if (sums != nullptr) sums->resize(job.blocks);
  kvist::pages::move(map, job, static_cast<std::size_t>(std::min(threads, kMaxThreads)),
                     sums != nullptr ? sums->data() : nullptr);
}

void move_pages(nb::handle direction, Array<std::uint64_t, 1> slots, Array<std::int64_t, 2> pages,
                nb::handle page_map, std::int64_t threads) {
  move(direction, slots, pages, page_map, threads, nullptr);
}

std::vector<std::uint64_t> move_pages_checksum(nb::handle direction,
                                               Array<std::uint64_t, 1> slots,
                                               Array<std::int64_t, 2> pages, nb::handle page_map,
                                               std::int64_t threads) {
  std::vector<std::uint64_t> sums;
  move(direction, slots, pages, page_map, threads, &sums);
  return sums;
}

}  // namespace

NB_MODULE(_core, m) {
  m.def("digest", &digest, nb::arg("data"));
  m.def("digest_variants", &digest_variants, nb::arg("data"));
  m.def("checksum", &checksum, nb::arg("data"));
  m.def("checksum_variants", &checksum_variants, nb::arg("data"));
  m.def("copy_checksum", &copy_checksum, nb::arg("dst"), nb::arg("src"));
  m.def("chain_keys", &chain_keys, nb::arg("seed"), nb::arg("tokens"), nb::arg("block_tokens"),
        nb::arg("extras").none() = nb::none());
  m.def("unpack_tokens", &unpack_tokens, nb::arg("packed"));
  m.def("block_keys", &block_keys, nb::arg("hashes"));
  m.def("move_pages", &move_pages, nb::arg("direction"), nb::arg("slots").noconvert(),
        nb::arg("pages").noconvert(), nb::arg("page_map"), nb::arg("threads") = 1);
  m.def("move_pages_checksum", &move_pages_checksum, nb::arg("direction"),
        nb::arg("slots").noconvert(), nb::arg("pages").noconvert(), nb::arg("page_map"),
        nb::arg("threads") = 1);
  nb::set_leak_warnings(false);  // a tier that was abandoned is alive at exit, and that is fine
  bind_answers(m);
  bind_io(m);
  bind_owners(m);
  bind_spans(m);
  bind_table(m);
  bind_value(m);
  bind_planes(m);
  bind_cachegen(m);
  bind_quantise(m);
}
