// The arithmetic of cachegen on single values: to float32 and back, and rotations. Nothing is fused
// (-ffp-contract=off), so every instruction set gives the bytes of the Python twin.
#pragma once

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvist::cachegen {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using i32 = std::int32_t;

enum class Dtype { bfloat16, float16, float32 };

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

// The nearest whole number, an even one where two are; of a value below 2^24.
inline i32 nearest(float value) {
#ifdef __SSE2__
  return _mm_cvtss_si32(_mm_set_ss(value));
#else
  return static_cast<i32>(std::nearbyint(value));
#endif
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

}  // namespace kvist::cachegen
