// The encoding side of `rans.hpp`: what encoding needs of each symbol, and rounds of 32 symbols in
// portable code and for vector units. All give the same bytes.
//
// A state is divided by a frequency by multiplying with its reciprocal: (x + 1/2) × (1 / f) in double
// is off by less than 2^-31, and the quotient of a whole number is at least 1 / 8192 away from the
// next whole number, so that cutting it off is exact.
#pragma once

#include "rans_rounds.hpp"

namespace kvist::rans {

constexpr std::size_t kSymbols = 256;
constexpr std::size_t kFrontBytes = 16;  // vectors are stored whole: before what is kept of them

// How often each symbol occurs, out of kScale; 0: never.
struct Frequencies {
  u16 of[kSymbols] = {};
};

// What encoding needs of each symbol. Frequencies are those of `normalise`, below kScale.
class EncodeTable {
 public:
  explicit EncodeTable(const Frequencies& frequencies) {
    u32 start = 0;
    for (std::size_t s = 0; s < kSymbols; ++s) {
      const u32 f = frequencies.of[s];
      inverse[s] = f == 0 ? 0.0 : 1.0 / f;
      packed[s] = f | start << 16;
      start += f;
    }
  }

  alignas(64) u32 packed[kSymbols];  // frequency, start << 16
  alignas(64) double inverse[kSymbols];
};

// Encodes rounds, the last first; moves `at` down by what was written. Kept are `at` and up.
using EncodeRounds = void (*)(const EncodeTable& table, const u8* symbols, u32* states, u8*& at,
                              std::size_t rounds);

inline void encode_step(const EncodeTable& table, u8 symbol, u32& state, u8*& at) {
  const u32 frequency = table.packed[symbol] & 0xFFFF, start = table.packed[symbol] >> 16;
  const bool full = (state >> (32 - kScaleBits)) >= frequency;
  const u16 word = static_cast<u16>(state);
  std::memcpy(at - 2, &word, 2);  // without a branch: it is kept only if `full`
  at -= full ? 2 : 0;
  const u32 x = full ? state >> 16 : state;
  const u32 quotient =
      static_cast<u32>(static_cast<std::int64_t>((x + 0.5) * table.inverse[symbol]));
  state = (quotient << kScaleBits) + (x - quotient * frequency) + start;
}

inline void encode_portable(const EncodeTable& table, const u8* symbols, u32* states, u8*& at,
                            std::size_t rounds) {
  for (std::size_t i = rounds * kLanes; i-- > 0;) {
    encode_step(table, symbols[i], states[i % kLanes], at);
  }
}

#ifdef KVIST_RANS_VECTORS
// For each set of lanes: the lanes in order, at the end of eight.
constexpr Spread make_gather() {
  Spread out{};
  for (u32 set = 0; set < 256; ++set) {
    u32 place = 8;
    for (u32 lane = 8; lane-- > 0;) {
      if (set >> lane & 1) out[set][--place] = lane;
    }
  }
  return out;
}

alignas(64) inline constexpr Spread kGather = make_gather();

__attribute__((target("avx2"))) inline __m128i quotients_avx2(__m128i x, __m128i symbols,
                                                              const double* inverse) {
  // There is no conversion of unsigned numbers: 2^31 less, then 2^31 more.
  const __m256d wide =
      _mm256_add_pd(_mm256_cvtepi32_pd(_mm_xor_si128(x, _mm_set1_epi32(INT32_MIN))),
                    _mm256_set1_pd(2147483648.5));
  return _mm256_cvttpd_epi32(_mm256_mul_pd(wide, _mm256_i32gather_pd(inverse, symbols, 8)));
}

__attribute__((target("avx2,popcnt"))) inline void encode_8(const EncodeTable& table,
                                                            const u8* symbols, __m256i* state,
                                                            u8*& at) {
  const __m256i x = _mm256_loadu_si256(state);
  const __m256i symbol =
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(symbols)));
  const __m256i packed =
      _mm256_i32gather_epi32(reinterpret_cast<const int*>(table.packed), symbol, 4);
  const __m256i words = _mm256_set1_epi32(0xFFFF);
  const __m256i frequency = _mm256_and_si256(packed, words);
  const __m256i room = _mm256_cmpgt_epi32(frequency, _mm256_srli_epi32(x, 32 - kScaleBits));
  const u32 set = ~static_cast<u32>(_mm256_movemask_ps(_mm256_castsi256_ps(room))) & 255u;
  const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(&kGather[set]));
  const __m256i out = _mm256_permutevar8x32_epi32(_mm256_and_si256(x, words), order);
  const __m256i narrow = _mm256_permute4x64_epi64(_mm256_packus_epi32(out, out), 8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at - 16), _mm256_castsi256_si128(narrow));
  at -= 2 * static_cast<std::size_t>(_mm_popcnt_u32(set));
  const __m256i y = _mm256_blendv_epi8(_mm256_srli_epi32(x, 16), x, room);
  const __m128i low = quotients_avx2(_mm256_castsi256_si128(y), _mm256_castsi256_si128(symbol),
                                     table.inverse);
  const __m128i high = quotients_avx2(_mm256_extracti128_si256(y, 1),
                                      _mm256_extracti128_si256(symbol, 1), table.inverse);
  const __m256i q = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  const __m256i rest = _mm256_sub_epi32(y, _mm256_mullo_epi32(q, frequency));
  _mm256_storeu_si256(state, _mm256_add_epi32(_mm256_add_epi32(_mm256_slli_epi32(q, kScaleBits),
                                                               rest),
                                              _mm256_srli_epi32(packed, 16)));
}

__attribute__((target("avx2,popcnt"))) inline void encode_avx2(const EncodeTable& table,
                                                               const u8* symbols, u32* states,
                                                               u8*& at, std::size_t rounds) {
  auto* const held = reinterpret_cast<__m256i*>(states);
  u8* to = at;
  for (std::size_t round = rounds; round-- > 0;) {
    for (std::size_t part = kLanes / 8; part-- > 0;) {
      encode_8(table, symbols + round * kLanes + part * 8, held + part, to);
    }
  }
  at = to;
}

__attribute__((target("avx512f"))) inline __m256i quotients_avx512(__m256i x, __m256i symbols,
                                                                   const double* inverse) {
  const __m512d wide = _mm512_add_pd(_mm512_cvtepu32_pd(x), _mm512_set1_pd(0.5));
  return _mm512_cvttpd_epu32(_mm512_mul_pd(wide, _mm512_i32gather_pd(symbols, inverse, 8)));
}

__attribute__((target("avx512f,avx512vl,avx512bw,popcnt"))) inline __m512i encode_16(
    const EncodeTable& table, const u8* symbols, __m512i x, u8*& at) {
  const __m512i symbol =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(symbols)));
  const __m512i packed = _mm512_i32gather_epi32(symbol, table.packed, 4);
  const __m512i frequency = _mm512_and_si512(packed, _mm512_set1_epi32(0xFFFF));
  const __mmask16 full =
      _mm512_cmpge_epu32_mask(_mm512_srli_epi32(x, 32 - kScaleBits), frequency);
  const auto count = static_cast<u32>(_mm_popcnt_u32(full));
  at -= 2 * std::size_t{count};
  _mm256_mask_storeu_epi16(at, static_cast<__mmask16>((1u << count) - 1),
                           _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, x)));
  const __m512i y = _mm512_mask_srli_epi32(x, full, x, 16);
  const __m256i low = quotients_avx512(_mm512_castsi512_si256(y), _mm512_castsi512_si256(symbol),
                                       table.inverse);
  const __m256i high = quotients_avx512(_mm512_extracti64x4_epi64(y, 1),
                                        _mm512_extracti64x4_epi64(symbol, 1), table.inverse);
  const __m512i q = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  const __m512i rest = _mm512_sub_epi32(y, _mm512_mullo_epi32(q, frequency));
  return _mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(q, kScaleBits), rest),
                          _mm512_srli_epi32(packed, 16));
}

__attribute__((target("avx512f,avx512vl,avx512bw,popcnt"))) inline void encode_avx512(
    const EncodeTable& table, const u8* symbols, u32* states, u8*& at, std::size_t rounds) {
  __m512i a = _mm512_loadu_si512(states), b = _mm512_loadu_si512(states + 16);
  u8* to = at;
  for (std::size_t round = rounds; round-- > 0;) {
    b = encode_16(table, symbols + round * kLanes + 16, b, to);
    a = encode_16(table, symbols + round * kLanes, a, to);
  }
  _mm512_storeu_si512(states, a);
  _mm512_storeu_si512(states + 16, b);
  at = to;
}
#endif

// Every way that this machine has, the best last.
inline const std::vector<EncodeRounds>& encode_variants() {
  static const std::vector<EncodeRounds> all = [] {
    std::vector<EncodeRounds> found{encode_portable};
#ifdef KVIST_RANS_VECTORS
    if (__builtin_cpu_supports("avx2")) found.push_back(encode_avx2);
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
      found.push_back(encode_avx512);
    }
#endif
    return found;
  }();
  return all;
}

inline EncodeRounds best_encode() { return encode_variants().back(); }

}  // namespace kvist::rans
