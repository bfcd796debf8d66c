// Conversions between float and the small floating-point formats, rounding to nearest, ties to
// even. Without branches and without subnormal floats in between, so that compilers vectorise them
// and a thread that flushes those to zero gets the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define KVIST_INLINE inline __attribute__((always_inline))

namespace kvist::numbers {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using i32 = std::int32_t;

constexpr u32 kMagnitude = 0x7FFFFFFFu;
constexpr u32 kInfinity = 0x7F800000u;

KVIST_INLINE u32 bits_of(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

KVIST_INLINE float float_of(u32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// By masks: where an arm of `?:` is floating-point arithmetic, compilers keep a branch.
KVIST_INLINE u32 select(bool condition, u32 yes, u32 no) {
  const u32 mask = 0u - static_cast<u32>(condition);
  return (yes & mask) | (no & ~mask);
}

KVIST_INLINE float from_bf16(u16 value) { return float_of(u32{value} << 16); }

KVIST_INLINE u16 to_bf16(float value) {
  const u32 bits = bits_of(value);
  const u32 rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return static_cast<u16>((bits & kMagnitude) > kInfinity ? bits >> 16 | 0x40 : rounded);
}

KVIST_INLINE float from_f16(u16 value) {
  const u32 magnitude = value & 0x7FFFu;
  const u32 normal = (magnitude << 13) + ((127u - 15u) << 23);
  // Subnormals: the number of steps of 2^-24, which a float holds exactly.
  const u32 small = bits_of(static_cast<float>(static_cast<i32>(magnitude)) * 0x1p-24f);
  const u32 special = magnitude << 13 | kInfinity;
  const u32 large = select(magnitude >= 0x7C00u, special, normal);
  const u32 out = select(magnitude < 0x0400u, small, large);
  return float_of(out | u32{static_cast<u16>(value & 0x8000u)} << 16);
}

KVIST_INLINE u16 to_f16(float value) {
  const u32 bits = bits_of(value), magnitude = bits & kMagnitude;
  const u32 normal = (magnitude - ((127u - 15u) << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
  // Below 2^-14: adding 1/2 leaves the number of steps of 2^-24 in the last bits.
  const u32 small = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const u32 special = select(magnitude > kInfinity, 0x7E00u, 0x7C00u);
  // From 65520 on a value rounds to infinity.
  const u32 large = select(magnitude >= 0x477FF000u, special, normal);
  const u32 out = select(magnitude < 0x38800000u, small, large);
  return static_cast<u16>(out | (bits >> 16 & 0x8000u));
}

// e4m3 without infinities; what is above 448 becomes 448.
KVIST_INLINE u8 to_e4m3(float value) {
  const u32 bits = bits_of(value), magnitude = bits & kMagnitude;
  const u32 normal = ((magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
  // Below 2^-6: adding 2^14 leaves the number of steps of 2^-9 in the last bits.
  const u32 small = bits_of(float_of(magnitude) + 0x1p14f) - bits_of(0x1p14f);
  const u32 code = select(magnitude < 0x3C800000u, small, normal);
  const u32 most = select(magnitude >= 0x43E00000u, 0x7Eu, code);
  return static_cast<u8>(most | (bits >> 24 & 0x80u));
}

KVIST_INLINE float from_e4m3(u8 code) {
  const u32 magnitude = code & 0x7Fu;
  const u32 normal = (magnitude << 20) + (120u << 23);
  const u32 small = bits_of(static_cast<float>(static_cast<i32>(magnitude)) * 0x1p-9f);
  const u32 large = select(magnitude == 0x7Fu, 0x7FC00000u, normal);
  const u32 out = select(magnitude < 8, small, large);
  return float_of(out | u32{static_cast<u8>(code & 0x80u)} << 24);
}

// The least bfloat16 that is at least `value`, a finite float above 0, but no subnormal one.
inline u16 bf16_above(float value) {
  const u32 bits = bits_of(value);
  const u32 up = (bits >> 16) + ((bits & 0xFFFF) != 0 ? 1 : 0);
  return static_cast<u16>(up < 0x0080u ? 0x0080u : up);
}

// Integers that stand in the order of the floats; -0 before +0.
KVIST_INLINE i32 ordered(float value) {
  const auto bits = static_cast<i32>(bits_of(value));
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

KVIST_INLINE float unordered(i32 value) {
  return float_of(static_cast<u32>(value ^ ((value >> 31) & 0x7FFFFFFF)));
}

}  // namespace kvist::numbers
