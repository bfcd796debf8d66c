// The arithmetic of cachegen: values to float32 and back, rotations, and small matrix products. Each
// sum runs in the order of its index and nothing is fused (-ffp-contract=off), so every instruction
// set gives the bytes of the Python twin.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define KVIST_CACHEGEN_VECTORS
#endif

namespace kvist::cachegen {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using i32 = std::int32_t;

enum class Dtype { bfloat16, float16, float32 };

constexpr std::size_t kWide = 16;  // a matrix row is padded to whole vectors of so many floats

inline std::size_t width_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

inline float float_of(u32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline u32 bits_of(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float from_half(u16 half) {
  const u32 sign = u32{half} >> 15 << 31;
  const u32 exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 31) return float_of(sign | 0x7F800000u | fraction << 13);
  if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
  const float small = static_cast<float>(fraction) * 0x1p-24f;
  return float_of(sign | bits_of(small));
}

// Of a finite value that is no larger than the largest half.
inline u16 to_half(float value) {
  const u32 bits = bits_of(value), sign = bits >> 31 << 15;
  const u32 magnitude = bits & 0x7FFFFFFFu;
  if (magnitude < 113u << 23) {  // below the smallest normal half: 2^-14
    const float rounded = float_of(magnitude) + 0.5f;  // the sum's last bit is 2^-24
    return static_cast<u16>(sign | (bits_of(rounded) - 0x3F000000u));
  }
  const u32 odd = magnitude >> 13 & 1;
  return static_cast<u16>(sign | (magnitude - (112u << 23) + 0xFFFu + odd) >> 13);
}

inline void load(const u8* from, std::size_t count, Dtype dtype, float* out) {
  if (dtype == Dtype::float32) {
    std::memcpy(out, from, count * 4);
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    u16 word;
    std::memcpy(&word, from + 2 * i, 2);
    out[i] = dtype == Dtype::bfloat16 ? float_of(u32{word} << 16) : from_half(word);
  }
}

inline float clamp(float value, float largest) {  // what is not a number becomes -largest
  const float above = value > -largest ? value : -largest;
  return above < largest ? above : largest;
}

__attribute__((always_inline)) inline void store_bfloat16(const float* from, std::size_t count,
                                                          u8* out) {
  const float largest = float_of(0x7F7F0000u);
  for (std::size_t i = 0; i < count; ++i) {
    const u32 bits = bits_of(clamp(from[i], largest));
    const u16 word = static_cast<u16>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
    std::memcpy(out + 2 * i, &word, 2);
  }
}

// The nearest value of the dtype, and its largest in place of what is beyond.
__attribute__((always_inline)) inline void store(const float* from, std::size_t count, Dtype dtype,
                                                 u8* out) {
  if (dtype == Dtype::bfloat16) return store_bfloat16(from, count, out);
  for (std::size_t i = 0; i < count; ++i) {
    if (dtype == Dtype::float32) {
      const float value = clamp(from[i], float_of(0x7F7FFFFFu));
      std::memcpy(out + 4 * i, &value, 4);
    } else {
      const u16 word = to_half(clamp(from[i], 65504.0f));
      std::memcpy(out + 2 * i, &word, 2);
    }
  }
}

// Channels i and i + pairs turned by an angle, for i < pairs; by -angle if `back`.
__attribute__((always_inline)) inline void turn(float* x, const float* cosine, const float* sine,
                                                std::size_t pairs, bool back) {
  for (std::size_t i = 0; i < pairs; ++i) {
    const float s = back ? -sine[i] : sine[i];
    const float a = x[i], b = x[i + pairs];
    x[i] = a * cosine[i] - b * s;
    x[i + pairs] = b * cosine[i] + a * s;
  }
}

// A product of `used` rows of a matrix (`[.][stride]`, stride in whole vectors) with values
// `[used][tokens]`: out `[tokens][stride]`.
struct Product {
  const float* matrix;
  std::size_t stride;
  const u32* rows;
  std::size_t used;
  const float* values;
  std::size_t tokens;
  float* out;
};

using Multiply = void (*)(const Product&);

#ifdef KVIST_CACHEGEN_VECTORS
typedef float Wide __attribute__((vector_size(4 * kWide), aligned(4), may_alias));

template <int kTokens, int kVectors>
__attribute__((always_inline)) inline void tile(const Product& p, std::size_t token,
                                                std::size_t column) {
  Wide sums[kTokens][kVectors] = {};
  for (std::size_t k = 0; k < p.used; ++k) {
    const float* const row = p.matrix + p.rows[k] * p.stride + column;
    const float* const value = p.values + k * p.tokens + token;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Wide part = *reinterpret_cast<const Wide*>(row + v * kWide);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) sums[t][v] += part * value[t];
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      *reinterpret_cast<Wide*>(p.out + (token + t) * p.stride + column + v * kWide) = sums[t][v];
    }
  }
}

template <int kTokens, int kVectors>
__attribute__((always_inline)) inline void multiply(const Product& p) {
  std::size_t column = 0;
  for (; column + kVectors * kWide <= p.stride; column += kVectors * kWide) {
    std::size_t token = 0;
    for (; token + kTokens <= p.tokens; token += kTokens) tile<kTokens, kVectors>(p, token, column);
    for (; token < p.tokens; ++token) tile<1, kVectors>(p, token, column);
  }
  for (; column < p.stride; column += kWide) {
    for (std::size_t token = 0; token < p.tokens; ++token) tile<1, 1>(p, token, column);
  }
}

inline void multiply_portable(const Product& p) { multiply<1, 1>(p); }
__attribute__((target("avx2"))) inline void multiply_avx2(const Product& p) { multiply<6, 1>(p); }
__attribute__((target("avx512f,prefer-vector-width=512"))) inline void multiply_avx512(
    const Product& p) {
  multiply<6, 4>(p);
}
#else
inline void multiply_portable(const Product& p) {
  for (std::size_t t = 0; t < p.tokens; ++t) {
    float* const out = p.out + t * p.stride;
    std::memset(out, 0, p.stride * sizeof(float));
    for (std::size_t k = 0; k < p.used; ++k) {
      const float* const row = p.matrix + p.rows[k] * p.stride;
      const float value = p.values[k * p.tokens + t];
      for (std::size_t c = 0; c < p.stride; ++c) out[c] += row[c] * value;
    }
  }
}
#endif

// Every way that this machine has, the best last.
inline const std::vector<Multiply>& multiply_variants() {
  static const std::vector<Multiply> all = [] {
    std::vector<Multiply> found{multiply_portable};
#ifdef KVIST_CACHEGEN_VECTORS
    if (__builtin_cpu_supports("avx2")) found.push_back(multiply_avx2);
    if (__builtin_cpu_supports("avx512f")) found.push_back(multiply_avx512);
#endif
    return found;
  }();
  return all;
}

}  // namespace kvist::cachegen
