// Heads and blocks of `quantise.hpp`: spans of rows are measured, quantised and read back.
#pragma once

#include "quantise.hpp"

namespace kvist::quantise {

// What is written of a body; the parts move on from head to head.
struct Writing {
  u8 *scales, *zeros, *codes;
  std::vector<u8> raw;
};

// What is read of a body; `end` ends the raw values.
struct Reading {
  const u8 *scales, *zeros, *codes, *raw, *end;
};

// Stores a group as it is, and lets its codes be those of zeros.
inline void set_aside(const u8* in, const Shape& shape, std::size_t width, const Corner& corner,
                      std::vector<u8>& raw, float* values) {
  for (std::size_t r = corner.row; r < corner.row + corner.rows; ++r) {
    const std::size_t at = r * shape.dim + corner.column;
    raw.insert(raw.end(), in + at * width, in + (at + corner.columns) * width);
    std::fill_n(values + at, corner.columns, 0.0f);
  }
}

template <Number N, Scheme S>
KVIST_INLINE void encode_head(const u8* in, const Shape& shape, bool by_channel, Writing& to,
                              Scratch& scratch) {
  const std::size_t dim = shape.dim;
  float* const values = scratch.values.data();
  to_floats<N>(in, values, shape.tokens * dim);
  for (std::size_t i = 0; i < span_count(shape, by_channel); ++i) {
    const Span span = span_of(shape, by_channel, i);
    i32 *const low = scratch.low.data(), *const high = scratch.high.data();
    extremes(values + span.first * dim, span.rows, dim, low, high);
    for (std::size_t g = 0; g < span.groups(dim); ++g) {
      const Corner corner = corner_of(shape, span, g);
      const auto from = static_cast<std::ptrdiff_t>(corner.column);
      const auto until = static_cast<std::ptrdiff_t>(corner.column + corner.columns);
      const Group group = measured<N, S>(unordered(*std::min_element(low + from, low + until)),
                                         unordered(*std::max_element(high + from, high + until)));
      std::memcpy(to.scales, &group.scale, 2);
      to.scales += 2;
      if constexpr (S == Scheme::kInt4) {
        store<N>(to.zeros, 0, group.zero);
        to.zeros += width_of(N);
      }
      scratch.zero[g] = group.zero;
      scratch.inverse[g] = group.inverse;
      if (group.scale == kRawScale) set_aside(in, shape, width_of(N), corner, to.raw, values);
    }
    spread(scratch.zero.data(), scratch.zeros.data(), dim, span.stride);
    spread(scratch.inverse.data(), scratch.inverses.data(), dim, span.stride);
    for (std::size_t r = span.first; r < span.first + span.rows; ++r) {
      encode_row<S>(values + r * dim, scratch.zeros.data(), scratch.inverses.data(), to.codes, dim);
      to.codes += row_bytes<S>(dim);
    }
  }
}

template <Number N, Scheme S>
KVIST_INLINE bool decode_head(Reading& from, const Shape& shape, bool by_channel, u8* out,
                              Scratch& scratch) {
  const std::size_t dim = shape.dim, width = width_of(N);
  for (std::size_t i = 0; i < span_count(shape, by_channel); ++i) {
    const Span span = span_of(shape, by_channel, i);
    const u8* const scales = from.scales;
    bool any_raw = false;
    for (std::size_t g = 0; g < span.groups(dim); ++g) {
      u16 scale;
      std::memcpy(&scale, scales + 2 * g, 2);
      any_raw |= scale == kRawScale;
      if (scale > kMostScale && scale != kRawScale) return false;
      scratch.inverse[g] = scale == kRawScale ? 0.0f : from_bf16(scale);
      if constexpr (S == Scheme::kInt4) scratch.zero[g] = load<N>(from.zeros, g);
    }
    from.scales += 2 * span.groups(dim);
    from.zeros += span.groups(dim) * zero_bytes<N, S>();
    spread(scratch.zero.data(), scratch.zeros.data(), dim, span.stride);
    spread(scratch.inverse.data(), scratch.inverses.data(), dim, span.stride);
    for (std::size_t r = span.first; r < span.first + span.rows; ++r) {
      decode_row<N, S>(from.codes, scratch.zeros.data(), scratch.inverses.data(),
                       out + r * dim * width, dim);
      from.codes += row_bytes<S>(dim);
    }
    for (std::size_t g = 0; any_raw && g < span.groups(dim); ++g) {
      u16 scale;
      std::memcpy(&scale, scales + 2 * g, 2);
      if (scale != kRawScale) continue;
      const Corner corner = corner_of(shape, span, g);
      const std::size_t bytes = corner.columns * width;
      for (std::size_t r = corner.row; r < corner.row + corner.rows; ++r, from.raw += bytes) {
        if (static_cast<std::size_t>(from.end - from.raw) < bytes) return false;
        std::memcpy(out + (r * dim + corner.column) * width, from.raw, bytes);
      }
    }
  }
  return true;
}

template <Number N, Scheme S>
struct Heads {
  void (*encode)(const u8*, const Shape&, bool, Writing&, Scratch&);
  bool (*decode)(Reading&, const Shape&, bool, u8*, Scratch&);
};

template <Number N, Scheme S>
void encode_portable(const u8* in, const Shape& s, bool k, Writing& to, Scratch& scratch) {
  encode_head<N, S>(in, s, k, to, scratch);
}

template <Number N, Scheme S>
bool decode_portable(Reading& from, const Shape& s, bool k, u8* out, Scratch& scratch) {
  return decode_head<N, S>(from, s, k, out, scratch);
}

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
// The same code, compiled for wider registers.
template <Number N, Scheme S>
__attribute__((target("avx2"))) void encode_avx2(const u8* in, const Shape& s, bool k, Writing& to,
                                                 Scratch& scratch) {
  encode_head<N, S>(in, s, k, to, scratch);
}

template <Number N, Scheme S>
__attribute__((target("avx2"))) bool decode_avx2(Reading& from, const Shape& s, bool k, u8* out,
                                                 Scratch& scratch) {
  return decode_head<N, S>(from, s, k, out, scratch);
}
#endif

template <Number N, Scheme S>
Heads<N, S> heads(bool portable) {
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
  static const bool wide = __builtin_cpu_supports("avx2") != 0;
  if (wide && !portable) return {encode_avx2<N, S>, decode_avx2<N, S>};
#endif
  static_cast<void>(portable);
  return {encode_portable<N, S>, decode_portable<N, S>};
}

// The body of a block of `shape`.
template <Number N, Scheme S>
std::vector<u8> encode(const u8* block, const Shape& shape, bool portable) {
  std::vector<u8> body(least_bytes<N, S>(shape));
  u8* const zeros = body.data() + 2 * shape.all_groups();
  Writing to{body.data(), zeros, zeros + shape.all_groups() * zero_bytes<N, S>(), {}};
  Scratch scratch(shape);
  const Heads<N, S> ways = heads<N, S>(portable);
  for (std::size_t plane = 0; plane < shape.planes(); ++plane) {
    const bool by_channel = shape.by_channel(plane / shape.heads % shape.kinds);
    ways.encode(block, shape, by_channel, to, scratch);
    block += shape.tokens * shape.dim * width_of(N);
  }
  body.insert(body.end(), to.raw.begin(), to.raw.end());
  return body;
}

// Fills `out` with a block of `shape`; false if `body` is not that of one.
template <Number N, Scheme S>
bool decode(const u8* body, std::size_t bytes, u8* out, const Shape& shape, bool portable) {
  const std::size_t least = least_bytes<N, S>(shape);
  if (bytes < least) return false;
  const u8* const zeros = body + 2 * shape.all_groups();
  Reading from{body, zeros, zeros + shape.all_groups() * zero_bytes<N, S>(), body + least,
               body + bytes};
  Scratch scratch(shape);
  const Heads<N, S> ways = heads<N, S>(portable);
  for (std::size_t plane = 0; plane < shape.planes(); ++plane) {
    const bool by_channel = shape.by_channel(plane / shape.heads % shape.kinds);
    if (!ways.decode(from, shape, by_channel, out, scratch)) return false;
    out += shape.tokens * shape.dim * width_of(N);
  }
  return from.raw == from.end;
}

}  // namespace kvist::quantise
