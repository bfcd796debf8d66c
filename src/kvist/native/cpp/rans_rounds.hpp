// The hot loop of `rans.hpp`: rounds of 32 symbols, one from each state, in portable code and for
// the vector units that the machine turns out to have. All give the same bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define KVIST_RANS_VECTORS
#include <immintrin.h>
#endif

namespace kvist::rans {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr unsigned kScaleBits = 12;
constexpr u32 kScale = 1u << kScaleBits;
constexpr std::size_t kLanes = 32;
constexpr u32 kLow = 1u << 16;             // a state below takes in a word
constexpr std::size_t kRoundBytes = 2 * kLanes;  // words that a round takes in at most

// Decodes up to `rounds` rounds while a whole round's words are surely there; moves `at`. Returns
// the rounds done. A slot is symbol | frequency << 8 | offset << 20.
using Rounds = std::size_t (*)(const u32* slots, u32* states, const u8*& at, const u8* end, u8* out,
                               std::size_t rounds);

inline u8 step(const u32* slots, u32& state) {
  const u32 slot = slots[state & (kScale - 1)];
  state = (slot >> 8 & (kScale - 1)) * (state >> kScaleBits) + (slot >> 20);
  return static_cast<u8>(slot);
}

inline u32 refill(u32 state, const u8*& at) {
  u16 word;
  std::memcpy(&word, at, 2);
  at += 2;
  return state << 16 | word;
}

inline bool has_round(const u8* at, const u8* end) {
  return static_cast<std::size_t>(end - at) >= kRoundBytes;
}

inline std::size_t rounds_portable(const u32* slots, u32* states, const u8*& at, const u8* end,
                                   u8* out, std::size_t rounds) {
  std::size_t done = 0;
  for (; done < rounds && has_round(at, end); ++done, out += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      out[lane] = step(slots, states[lane]);
      if (states[lane] < kLow) states[lane] = refill(states[lane], at);
    }
  }
  return done;
}

#ifdef KVIST_RANS_VECTORS
// For each set of lanes: which of the next words goes to each lane of the set.
using Spread = std::array<std::array<u32, 8>, 256>;

constexpr Spread make_spread() {
  Spread out{};
  for (u32 set = 0; set < 256; ++set) {
    u32 next = 0;
    for (u32 lane = 0; lane < 8; ++lane) out[set][lane] = set >> lane & 1 ? next++ : 0;
  }
  return out;
}

alignas(64) inline constexpr Spread kSpread = make_spread();

__attribute__((target("avx2,popcnt"))) inline __m256i round_avx2(const u32* slots, __m256i& state,
                                                                 const u8*& at) {
  const __m256i low = _mm256_set1_epi32(kScale - 1);
  const __m256i slot = _mm256_i32gather_epi32(reinterpret_cast<const int*>(slots),
                                              _mm256_and_si256(state, low), 4);
  const __m256i frequency = _mm256_and_si256(_mm256_srli_epi32(slot, 8), low);
  const __m256i next =
      _mm256_add_epi32(_mm256_mullo_epi32(frequency, _mm256_srli_epi32(state, kScaleBits)),
                       _mm256_srli_epi32(slot, 20));
  const __m256i hungry =
      _mm256_cmpeq_epi32(_mm256_srli_epi32(next, 16), _mm256_setzero_si256());
  const auto set = static_cast<u32>(_mm256_movemask_ps(_mm256_castsi256_ps(hungry)));
  const __m256i words =
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  const __m256i spread = _mm256_load_si256(reinterpret_cast<const __m256i*>(&kSpread[set]));
  const __m256i filled = _mm256_or_si256(_mm256_slli_epi32(next, 16),
                                         _mm256_permutevar8x32_epi32(words, spread));
  state = _mm256_blendv_epi8(next, filled, hungry);
  at += 2 * static_cast<std::size_t>(_mm_popcnt_u32(set));
  return _mm256_and_si256(slot, _mm256_set1_epi32(255));
}

__attribute__((target("avx2,popcnt"))) inline std::size_t rounds_avx2(
    const u32* slots, u32* states, const u8*& at, const u8* end, u8* out, std::size_t rounds) {
  auto* const held = reinterpret_cast<__m256i*>(states);
  __m256i a = _mm256_loadu_si256(held), b = _mm256_loadu_si256(held + 1);
  __m256i c = _mm256_loadu_si256(held + 2), d = _mm256_loadu_si256(held + 3);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const u8* from = at;
  std::size_t done = 0;
  for (; done < rounds && has_round(from, end); ++done, out += kLanes) {
    const __m256i p = round_avx2(slots, a, from), q = round_avx2(slots, b, from);
    const __m256i r = round_avx2(slots, c, from), s = round_avx2(slots, d, from);
    const __m256i bytes =
        _mm256_packus_epi16(_mm256_packus_epi32(p, q), _mm256_packus_epi32(r, s));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm256_permutevar8x32_epi32(bytes, order));
  }
  _mm256_storeu_si256(held, a);
  _mm256_storeu_si256(held + 1, b);
  _mm256_storeu_si256(held + 2, c);
  _mm256_storeu_si256(held + 3, d);
  at = from;
  return done;
}

__attribute__((target("avx512f,popcnt"))) inline __m128i round_avx512(const u32* slots,
                                                                      __m512i& state,
                                                                      const u8*& at) {
  const __m512i low = _mm512_set1_epi32(kScale - 1);
  const __m512i slot = _mm512_i32gather_epi32(_mm512_and_si512(state, low), slots, 4);
  const __m512i frequency = _mm512_and_si512(_mm512_srli_epi32(slot, 8), low);
  const __m512i next =
      _mm512_add_epi32(_mm512_mullo_epi32(frequency, _mm512_srli_epi32(state, kScaleBits)),
                       _mm512_srli_epi32(slot, 20));
  const __mmask16 hungry = _mm512_cmplt_epu32_mask(next, _mm512_set1_epi32(kLow));
  const __m512i words =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  const __m512i filled =
      _mm512_or_si512(_mm512_slli_epi32(next, 16), _mm512_maskz_expand_epi32(hungry, words));
  state = _mm512_mask_mov_epi32(next, hungry, filled);
  at += 2 * static_cast<std::size_t>(_mm_popcnt_u32(hungry));
  return _mm512_cvtepi32_epi8(slot);
}

__attribute__((target("avx512f,popcnt"))) inline std::size_t rounds_avx512(
    const u32* slots, u32* states, const u8*& at, const u8* end, u8* out, std::size_t rounds) {
  __m512i a = _mm512_loadu_si512(states), b = _mm512_loadu_si512(states + 16);
  const u8* from = at;
  std::size_t done = 0;
  for (; done < rounds && has_round(from, end); ++done, out += kLanes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), round_avx512(slots, a, from));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16), round_avx512(slots, b, from));
  }
  _mm512_storeu_si512(states, a);
  _mm512_storeu_si512(states + 16, b);
  at = from;
  return done;
}
#endif

// Every way that this machine has, the best last.
inline const std::vector<Rounds>& round_variants() {
  static const std::vector<Rounds> all = [] {
    std::vector<Rounds> found{rounds_portable};
#ifdef KVIST_RANS_VECTORS
    if (__builtin_cpu_supports("avx2")) found.push_back(rounds_avx2);
    if (__builtin_cpu_supports("avx512f")) found.push_back(rounds_avx512);
#endif
    return found;
  }();
  return all;
}

inline Rounds best_rounds() { return round_variants().back(); }

}  // namespace kvist::rans
