// A block in planes of bytes, each coded with a table of its own: the body of a lossless payload.
//
// A block is `groups` runs of `values` values of `width` bytes. Each value is rotated left by one
// bit, so that sign and last mantissa bits stand together below the exponent: for bfloat16 and
// float32 the top byte is then the exponent, whole. Byte j of all values of a group, the top one
// first, is plane j. Values of one byte are taken as they are.
//
//   directory   for each group, for each plane: a byte how it is stored, and with
//                 1 constant: the byte       2 coded: the table (`rans::pack`)
//   raw         the planes stored raw (0), in order
//   stream      of all coded planes, in order (`rans.hpp`); absent if there are none
//
// A plane is coded if that spares at least a 64th of it: what spares less would only cost time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.hpp"
#include "rans.hpp"

namespace kvist::planes {

using rans::u16;
using rans::u32;
using rans::u64;
using rans::u8;

struct Shape {
  std::size_t groups;
  std::size_t values;
  std::size_t width;  // 1, 2 or 4

  std::size_t group_bytes() const { return values * width; }
};

enum class Stored : u8 { kRaw = 0, kConstant = 1, kCoded = 2 };

// ---- values ⇄ planes -----------------------------------------------------------------------------



KVIST_INLINE void split_2(const u8* in, u8* out, std::size_t values) {
  for (std::size_t i = 0; i < values; ++i) {
    u16 v;
    std::memcpy(&v, in + 2 * i, 2);
    v = static_cast<u16>(v << 1 | v >> 15);
    out[i] = static_cast<u8>(v >> 8);
    out[values + i] = static_cast<u8>(v);
  }
}

KVIST_INLINE void join_2(const u8* const* in, u8* out, std::size_t values) {
  const u8 *const top = in[0], *const low = in[1];
  for (std::size_t i = 0; i < values; ++i) {
    const auto v = static_cast<u16>(top[i] << 8 | low[i]);
    const auto turned = static_cast<u16>(v >> 1 | v << 15);
    std::memcpy(out + 2 * i, &turned, 2);
  }
}

KVIST_INLINE void split_4(const u8* in, u8* out, std::size_t values) {
  for (std::size_t i = 0; i < values; ++i) {
    u32 v;
    std::memcpy(&v, in + 4 * i, 4);
    v = v << 1 | v >> 31;
    out[i] = static_cast<u8>(v >> 24);
    out[values + i] = static_cast<u8>(v >> 16);
    out[2 * values + i] = static_cast<u8>(v >> 8);
    out[3 * values + i] = static_cast<u8>(v);
  }
}

KVIST_INLINE void join_4(const u8* const* in, u8* out, std::size_t values) {
  const u8 *const a = in[0], *const b = in[1], *const c = in[2], *const d = in[3];
  for (std::size_t i = 0; i < values; ++i) {
    const u32 v = u32{a[i]} << 24 | u32{b[i]} << 16 | u32{c[i]} << 8 | u32{d[i]};
    const u32 turned = v >> 1 | v << 31;
    std::memcpy(out + 4 * i, &turned, 4);
  }
}

struct Moves {
  void (*split_2)(const u8*, u8*, std::size_t);
  void (*join_2)(const u8* const*, u8*, std::size_t);
  void (*split_4)(const u8*, u8*, std::size_t);
  void (*join_4)(const u8* const*, u8*, std::size_t);
};

#ifdef KVIST_RANS_VECTORS
// The same code, compiled for wider registers.
#define KVIST_WIDE __attribute__((target("avx2"))) inline
KVIST_WIDE void split_2_avx2(const u8* in, u8* out, std::size_t n) { split_2(in, out, n); }
KVIST_WIDE void join_2_avx2(const u8* const* in, u8* out, std::size_t n) { join_2(in, out, n); }
KVIST_WIDE void split_4_avx2(const u8* in, u8* out, std::size_t n) { split_4(in, out, n); }
KVIST_WIDE void join_4_avx2(const u8* const* in, u8* out, std::size_t n) { join_4(in, out, n); }
#endif

inline const Moves& moves() {
  static const Moves best = [] {
#ifdef KVIST_RANS_VECTORS
    if (__builtin_cpu_supports("avx2")) {
      return Moves{split_2_avx2, join_2_avx2, split_4_avx2, join_4_avx2};
    }
#endif
    return Moves{[](const u8* in, u8* out, std::size_t n) { split_2(in, out, n); },
                 [](const u8* const* in, u8* out, std::size_t n) { join_2(in, out, n); },
                 [](const u8* in, u8* out, std::size_t n) { split_4(in, out, n); },
                 [](const u8* const* in, u8* out, std::size_t n) { join_4(in, out, n); }};
  }();
  return best;
}

// The planes of one group, one behind the other.
inline void split(const u8* in, u8* out, const Shape& shape) {
  if (shape.width == 1) std::memcpy(out, in, shape.values);
  if (shape.width == 2) moves().split_2(in, out, shape.values);
  if (shape.width == 4) moves().split_4(in, out, shape.values);
}

inline void join(const u8* const* in, u8* out, const Shape& shape) {
  if (shape.width == 1) std::memcpy(out, in[0], shape.values);
  if (shape.width == 2) moves().join_2(in, out, shape.values);
  if (shape.width == 4) moves().join_4(in, out, shape.values);
}

inline void count(const u8* in, std::size_t bytes, u64* counts) {
  u32 partial[4 * rans::kSymbols] = {};  // four, so that equal neighbours do not wait
  std::size_t i = 0;
  for (; i + 4 <= bytes; i += 4) {
    for (std::size_t k = 0; k < 4; ++k) ++partial[k * rans::kSymbols + in[i + k]];
  }
  for (; i < bytes; ++i) ++partial[in[i]];
  for (std::size_t s = 0; s < rans::kSymbols; ++s) {
    counts[s] = 0;
    for (std::size_t k = 0; k < 4; ++k) counts[s] += partial[k * rans::kSymbols + s];
  }
}

// ---- encoding ------------------------------------------------------------------------------------

struct Plan {
  Stored stored = Stored::kRaw;
  rans::Frequencies frequencies;
};

inline Plan plan(const u8* plane, std::size_t values) {
  u64 counts[rans::kSymbols];
  count(plane, values, counts);
  if (counts[plane[0]] == values) return {Stored::kConstant, {}};
  Plan out{Stored::kCoded, rans::normalise(counts)};
  const u64 coded = rans::cost_bytes(counts, out.frequencies) + rans::table_bytes(out.frequencies);
  if (coded + values / 64 >= values) out.stored = Stored::kRaw;
  return out;
}

// The body of `block`, which has groups × values × width bytes, none of them 0.
inline std::vector<u8> encode(const u8* block, const Shape& shape,
                              rans::EncodeRounds rounds = rans::best_encode()) {
  const std::size_t count = shape.groups * shape.width;
  std::vector<u8> scratch(shape.group_bytes()), directory, raw;
  std::vector<Plan> plans(count);
  std::size_t coded = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t j = i % shape.width;
    if (j == 0) split(block + i / shape.width * shape.group_bytes(), scratch.data(), shape);
    const u8* const plane = scratch.data() + j * shape.values;
    const Plan& made = plans[i] = plan(plane, shape.values);
    directory.push_back(static_cast<u8>(made.stored));
    if (made.stored == Stored::kConstant) directory.push_back(plane[0]);
    if (made.stored == Stored::kRaw) raw.insert(raw.end(), plane, plane + shape.values);
    if (made.stored == Stored::kCoded) {
      directory.resize(directory.size() + rans::table_bytes(made.frequencies));
      rans::pack(made.frequencies,
                 directory.data() + directory.size() - rans::table_bytes(made.frequencies));
      coded += shape.values;
    }
  }
  directory.insert(directory.end(), raw.begin(), raw.end());
  if (coded == 0) return directory;
  rans::Encoder stream(coded, rounds);
  for (std::size_t group = shape.groups; group-- > 0;) {
    split(block + group * shape.group_bytes(), scratch.data(), shape);
    for (std::size_t j = shape.width; j-- > 0;) {
      const Plan& made = plans[group * shape.width + j];
      if (made.stored != Stored::kCoded) continue;
      stream.run(rans::EncodeTable(made.frequencies), scratch.data() + j * shape.values,
                 shape.values);
    }
  }
  stream.finish();
  directory.insert(directory.end(), stream.data(), stream.data() + stream.bytes());
  return directory;
}

// ---- decoding ------------------------------------------------------------------------------------

struct Entry {
  Stored stored;
  const u8* at;  // constant: the byte; coded: the table; raw: the plane
};

// The directory of a body, or nothing if it is none. Moves `at` behind the raw planes.
inline std::vector<Entry> read_directory(const u8*& at, const u8* end, const Shape& shape) {
  const std::size_t count = shape.groups * shape.width;
  std::vector<Entry> out;
  if (static_cast<std::size_t>(end - at) < count) return {};
  out.reserve(count);
  rans::Frequencies table;
  for (std::size_t i = 0; i < count; ++i) {
    if (at == end || *at > static_cast<u8>(Stored::kCoded)) return {};
    const Entry entry{static_cast<Stored>(*at), at + 1};
    const auto left = static_cast<std::size_t>(end - entry.at);
    std::size_t bytes = entry.stored == Stored::kConstant ? 1 : 0;
    if (entry.stored == Stored::kCoded && (bytes = rans::unpack(entry.at, left, table)) == 0) {
      return {};
    }
    if (bytes > left) return {};
    at = entry.at + bytes;
    out.push_back(entry);
  }
  for (Entry& entry : out) {
    if (entry.stored != Stored::kRaw) continue;
    if (static_cast<std::size_t>(end - at) < shape.values) return {};
    entry.at = at;
    at += shape.values;
  }
  return out;
}

// Fills `out`; false if the body is not one of this shape. Takes memory for one group's planes.
inline bool decode(const u8* body, std::size_t bytes, u8* out, const Shape& shape,
                   rans::Rounds rounds = rans::best_rounds()) {
  const u8* const end = body + bytes;
  const std::vector<Entry> entries = read_directory(body, end, shape);
  if (entries.empty()) return false;
  rans::Decoder stream(body, static_cast<std::size_t>(end - body), rounds);
  std::vector<u8> scratch(shape.group_bytes());
  rans::DecodeTable table;
  bool coded = false;
  for (std::size_t group = 0; group < shape.groups; ++group, out += shape.group_bytes()) {
    const u8* planes[4];
    for (std::size_t j = 0; j < shape.width; ++j) {
      const Entry& entry = entries[group * shape.width + j];
      u8* const plane = scratch.data() + j * shape.values;
      planes[j] = entry.stored == Stored::kRaw ? entry.at : plane;
      if (entry.stored == Stored::kConstant) std::memset(plane, *entry.at, shape.values);
      if (entry.stored != Stored::kCoded) continue;
      coded = true;
      rans::Frequencies frequencies;
      rans::unpack(entry.at, static_cast<std::size_t>(end - entry.at), frequencies);
      if (!table.build(frequencies) || !stream.run(table, plane, shape.values)) return false;
    }
    join(planes, out, shape);
  }
  return coded ? stream.ended() : body == end;
}

}  // namespace kvist::planes
