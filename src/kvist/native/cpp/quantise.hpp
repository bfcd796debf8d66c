// Blocks in few bits a value, with a scale for each group: the body of an int8, fp8 or int4 payload.
//
// With K and V, a group of K is up to `group` tokens of one channel of one head, a group of V up to
// `group` channels of one token (KIVI: a channel of K stays large from token to token, one of V does
// not). A latent is grouped as V.
//
//   scales   bfloat16, for each head in order: K [token group][channel], V [token][channel group]
//   zeros    int4 only: the least value of each group, in the block's own numbers
//   codes    for each head and token: a byte a channel, or for int4 half of one: the low halves
//            are the first ceil(dim / 2) channels, the high halves the others
//   raw      the values of the groups stored raw, in order
//
// A group is stored raw, its scale being 0x7FFF, if it holds what is not finite or if the largest
// value that its codes can mean would not be finite in the block's numbers.
//
//   int8   scale = max|x| / 127                 x ≈ scale × code
//   fp8    scale = max|x| / 448                 x ≈ scale × e4m3
//   int4   scale = (max x - min x) / 15         x ≈ min x + scale × code
//
// Scales are rounded up; 0 where all values are the same (0 for int8 and fp8). All arithmetic is in
// float32, in this order and without contraction: `quantise_twin.py` gives the same bytes.
//
// Source: KIVI, arXiv:2402.02750; we group V's channels as K's tokens, and round scales to bfloat16.
#pragma once

#include <algorithm>
#include <vector>

#include "numbers.hpp"

namespace kvist::quantise {

using namespace kvist::numbers;

enum class Scheme { kInt8 = 0, kFp8 = 1, kInt4 = 2 };
enum class Number { kBf16 = 0, kF16 = 1, kF32 = 2 };

constexpr u16 kRawScale = 0x7FFF;
constexpr u16 kMostScale = 0x7F7F;  // the largest finite bfloat16

struct Shape {
  std::size_t layers, kinds, heads, tokens, dim, group;

  bool by_channel(std::size_t kind) const { return kinds == 2 && kind == 0; }
  std::size_t token_groups() const { return (tokens + group - 1) / group; }
  std::size_t channel_groups() const { return (dim + group - 1) / group; }
  std::size_t groups(std::size_t kind) const {
    return by_channel(kind) ? token_groups() * dim : tokens * channel_groups();
  }
  std::size_t all_groups() const {
    return layers * heads * (groups(0) + (kinds == 2 ? groups(1) : 0));
  }
  std::size_t planes() const { return layers * kinds * heads; }
};

constexpr std::size_t width_of(Number n) { return n == Number::kF32 ? 4 : 2; }

template <Number N>
KVIST_INLINE float load(const u8* in, std::size_t i) {
  if constexpr (N == Number::kF32) {
    float value;
    std::memcpy(&value, in + 4 * i, 4);
    return value;
  } else {
    u16 value;
    std::memcpy(&value, in + 2 * i, 2);
    return N == Number::kBf16 ? from_bf16(value) : from_f16(value);
  }
}

template <Number N>
KVIST_INLINE void store(u8* out, std::size_t i, float value) {
  if constexpr (N == Number::kF32) {
    std::memcpy(out + 4 * i, &value, 4);
  } else {
    const u16 bits = N == Number::kBf16 ? to_bf16(value) : to_f16(value);
    std::memcpy(out + 2 * i, &bits, 2);
  }
}

// Whether `value` is finite in the block's numbers.
template <Number N>
inline bool finite(float value) {
  u8 bits[4];
  store<N>(bits, 0, value);
  return (bits_of(load<N>(bits, 0)) & kMagnitude) < kInfinity;
}

template <Scheme S>
constexpr std::size_t row_bytes(std::size_t dim) {
  return S == Scheme::kInt4 ? (dim + 1) / 2 : dim;
}

template <Number N, Scheme S>
constexpr std::size_t zero_bytes() {
  return S == Scheme::kInt4 ? width_of(N) : 0;
}

template <Number N, Scheme S>
std::size_t least_bytes(const Shape& shape) {
  return shape.all_groups() * (2 + zero_bytes<N, S>()) +
         shape.planes() * shape.tokens * row_bytes<S>(shape.dim);
}

// Where a group's values are: rows × columns of one head from (row, column) on.
struct Corner {
  std::size_t row, rows, column, columns;
};

// The groups of one head as *spans*: rows whose groups have their scales in the same columns. For K
// a span is a token group with a scale for each column, for V it is a token.
struct Span {
  std::size_t first, rows, stride;  // `stride` columns share a group
  std::size_t groups(std::size_t dim) const { return (dim + stride - 1) / stride; }
};

inline std::size_t span_count(const Shape& shape, bool by_channel) {
  return by_channel ? shape.token_groups() : shape.tokens;
}

inline Span span_of(const Shape& shape, bool by_channel, std::size_t i) {
  if (!by_channel) return {i, 1, shape.group};
  const std::size_t first = i * shape.group;
  return {first, std::min(shape.group, shape.tokens - first), 1};
}

inline Corner corner_of(const Shape& shape, const Span& span, std::size_t group) {
  const std::size_t column = group * span.stride;
  return {span.first, span.rows, column, std::min(span.stride, shape.dim - column)};
}

// A value for each column from one for each group.
inline void spread(const float* groups, float* columns, std::size_t dim, std::size_t stride) {
  for (std::size_t g = 0, c = 0; c < dim; ++g) {
    const std::size_t end = std::min(dim, c + stride);
    for (const float value = groups[g]; c < end; ++c) columns[c] = value;
  }
}

// ---- rows: the loops that take the time ----------------------------------------------------------

template <Scheme S>
KVIST_INLINE float quantised(float x, float zero, float inverse) {
  const float scaled = S == Scheme::kInt4 ? (x - zero) * inverse : x * inverse;
  // Adding 3 × 2^22 rounds to an integer, ties to even; the bounds are for what rounding exceeds.
  return S == Scheme::kFp8 ? scaled : (scaled + 0x1.8p23f) - 0x1.8p23f;
}

template <Scheme S>
KVIST_INLINE u8 code_of(float x, float zero, float inverse) {
  const float q = quantised<S>(x, zero, inverse);
  if constexpr (S == Scheme::kFp8) return to_e4m3(q);
  const float least = S == Scheme::kInt8 ? -127.0f : 0.0f, most = S == Scheme::kInt8 ? 127.f : 15.f;
  const float held = q < least ? least : q > most ? most : q;
  return static_cast<u8>(static_cast<i32>(held));
}

template <Scheme S>
KVIST_INLINE void encode_row(const float* x, const float* zero, const float* inverse, u8* codes,
                             std::size_t dim) {
  if constexpr (S == Scheme::kInt4) {
    const std::size_t half = (dim + 1) / 2;
    for (std::size_t i = 0; i < half; ++i) codes[i] = code_of<S>(x[i], zero[i], inverse[i]);
    for (std::size_t i = half; i < dim; ++i) {
      const u32 high = u32{code_of<S>(x[i], zero[i], inverse[i])} << 4;
      codes[i - half] = static_cast<u8>(codes[i - half] | high);
    }
  } else {
    for (std::size_t i = 0; i < dim; ++i) codes[i] = code_of<S>(x[i], 0.0f, inverse[i]);
  }
}

template <Number N, Scheme S>
KVIST_INLINE void decode_row(const u8* codes, const float* zero, const float* scale, u8* out,
                             std::size_t dim) {
  if constexpr (S == Scheme::kInt4) {
    const std::size_t half = (dim + 1) / 2;
    for (std::size_t i = 0; i < half; ++i) {
      store<N>(out, i, zero[i] + static_cast<float>(codes[i] & 15) * scale[i]);
    }
    for (std::size_t i = half; i < dim; ++i) {
      store<N>(out, i, zero[i] + static_cast<float>(codes[i - half] >> 4) * scale[i]);
    }
  } else {
    for (std::size_t i = 0; i < dim; ++i) {
      const float code = S == Scheme::kInt8
                             ? static_cast<float>(static_cast<std::int8_t>(codes[i]))
                             : from_e4m3(codes[i]);
      store<N>(out, i, code * scale[i]);
    }
  }
}

// The least and the greatest value of each column over rows, as ordered integers.
KVIST_INLINE void extremes(const float* x, std::size_t rows, std::size_t dim, i32* low, i32* high) {
  for (std::size_t c = 0; c < dim; ++c) low[c] = high[c] = ordered(x[c]);
  for (std::size_t r = 1; r < rows; ++r) {
    const float* const row = x + r * dim;
    for (std::size_t c = 0; c < dim; ++c) {
      const i32 value = ordered(row[c]);
      low[c] = value < low[c] ? value : low[c];
      high[c] = value > high[c] ? value : high[c];
    }
  }
}

template <Number N>
KVIST_INLINE void to_floats(const u8* in, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = load<N>(in, i);
}

// ---- groups --------------------------------------------------------------------------------------

struct Group {
  u16 scale = kRawScale;
  float zero = 0.0f;
  float inverse = 0.0f;
};

// How a group whose values lie from `low` to `high` is stored.
template <Number N, Scheme S>
Group measured(float low, float high) {
  constexpr float kMost = S == Scheme::kInt8 ? 127.0f : S == Scheme::kFp8 ? 448.0f : 15.0f;
  const auto is_finite = [](float v) { return (bits_of(v) & kMagnitude) < kInfinity; };
  Group out;
  if (!is_finite(low) || !is_finite(high)) return out;
  const bool zeroed = S == Scheme::kInt4;
  const float base = zeroed ? low + 0.0f : 0.0f;  // +0 for -0
  const float reach =
      zeroed ? high - base : std::max(float_of(bits_of(low) & kMagnitude),
                                      float_of(bits_of(high) & kMagnitude));
  if (!is_finite(reach)) return out;
  const float step = reach / kMost;
  const u16 scale = reach == 0.0f ? u16{0} : bf16_above(step);
  const float wide = from_bf16(scale);
  if (scale > kMostScale || !finite<N>(base + wide * kMost)) return out;
  return {scale, base, scale == 0 ? 0.0f : 1.0f / wide};
}

struct Scratch {
  explicit Scratch(const Shape& shape)
      : values(shape.tokens * shape.dim), low(shape.dim), high(shape.dim), zero(shape.dim),
        inverse(shape.dim), zeros(shape.dim), inverses(shape.dim) {}
  std::vector<float> values;
  std::vector<i32> low, high;
  std::vector<float> zero, inverse;    // of each group of a span
  std::vector<float> zeros, inverses;  // of each column
};

}  // namespace kvist::quantise
