// The matrix products of cachegen. Forward: float32, each sum in the order of its index, nothing
// fused. Back: whole numbers modulo 2^32, exact in any order, so that every instruction set that
// the machine turns out to have gives the same bytes.
#pragma once

#include <algorithm>
#include <vector>

#include "cachegen_turn.hpp"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define KVIST_CACHEGEN_VECTORS
#include <immintrin.h>
#endif

namespace kvist::cachegen {

constexpr std::size_t kWide = 32;  // a matrix row is padded to whole vectors of so many channels

// out `[tokens][stride]` = values `[count][tokens]` turned over, times matrix `[count][stride]`.
struct Product {
  const float* matrix;
  std::size_t stride;
  const float* values;
  std::size_t count, tokens;
  float* out;
};

template <std::size_t kTokens>
__attribute__((always_inline)) inline void multiply_tile(const Product& p, std::size_t token,
                                                         std::size_t column) {
  float sums[kTokens][kWide] = {};
  for (std::size_t k = 0; k < p.count; ++k) {
    const float* const row = p.matrix + k * p.stride + column;
    const float* const value = p.values + k * p.tokens + token;
    for (std::size_t t = 0; t < kTokens; ++t) {
      for (std::size_t c = 0; c < kWide; ++c) sums[t][c] += row[c] * value[t];
    }
  }
  for (std::size_t t = 0; t < kTokens; ++t) {
    std::memcpy(p.out + (token + t) * p.stride + column, sums[t], sizeof(sums[t]));
  }
}

template <std::size_t kTokens>
__attribute__((always_inline)) inline void multiply_all(const Product& p) {
  for (std::size_t column = 0; column < p.stride; column += kWide) {
    std::size_t token = 0;
    for (; token + kTokens <= p.tokens; token += kTokens) multiply_tile<kTokens>(p, token, column);
    for (; token < p.tokens; ++token) multiply_tile<1>(p, token, column);
  }
}

using Multiply = void (*)(const Product&);

inline void multiply_portable(const Product& p) { multiply_all<1>(p); }

// A head's block while it is put together again: `used` pairs of directions of which one at least
// is not zero everywhere.
struct Region {
  const std::int16_t* basis;  // [dim / 2 pairs][stride channels][2]
  const float* scale;         // [stride]
  const float* mean;          // [stride]
  std::size_t stride, dim;
  const u32* pairs;     // [used]: which
  const i32* values;    // [used][2][tokens]: for what no 16 bits hold
  const u32* packed;    // [used][tokens]: two directions of 16 bits each
  std::size_t used, tokens;
  bool wide;            // some value takes more than 16 bits
  const u32* kept;      // [tokens]: their places in the block
  const float* cosine;  // [.][turned] by place
  const float* sine;
  std::size_t turned;  // pairs of channels that RoPE turns
  Dtype dtype;
  u8* out;
};

// Sums of one token → its values.
__attribute__((always_inline)) inline void finish(const Region& r, std::size_t token,
                                                  const i32* sums, float* x) {
  for (std::size_t c = 0; c < r.stride; ++c) {
    x[c] = static_cast<float>(sums[c]) * r.scale[c] + r.mean[c];
  }
  const std::size_t place = r.kept[token];
  turn(x, r.cosine + place * r.turned, r.sine + place * r.turned, r.turned, false);
  store(x, r.dim, r.dtype, r.out + place * r.dim * width_of(r.dtype));
}

using Rebuild = void (*)(const Region&, i32* sums, float* x);  // scratch: [8][stride], [stride]

// Any values, any machine.
inline void rebuild_portable(const Region& r, i32* sums, float* x) {
  auto* const total = reinterpret_cast<u32*>(sums);
  for (std::size_t t = 0; t < r.tokens; ++t) {
    std::memset(sums, 0, r.stride * sizeof(i32));
    for (std::size_t k = 0; k < r.used; ++k) {
      const std::int16_t* const row = r.basis + r.pairs[k] * r.stride * 2;
      const auto a = static_cast<u32>(r.values[2 * k * r.tokens + t]);
      const auto b = static_cast<u32>(r.values[(2 * k + 1) * r.tokens + t]);
      for (std::size_t c = 0; c < r.stride; ++c) {
        total[c] += static_cast<u32>(i32{row[2 * c]}) * a + static_cast<u32>(i32{row[2 * c + 1]}) * b;
      }
    }
    finish(r, t, sums, x);
  }
}

#ifdef KVIST_CACHEGEN_VECTORS
struct Sse2 {
  using Vector = __m128i;
  static constexpr int kTokens = 4, kVectors = 2;
  static constexpr std::size_t kLanes = 4;
};
struct Avx2 {
  using Vector = __m256i;
  static constexpr int kTokens = 4, kVectors = 2;
  static constexpr std::size_t kLanes = 8;
};
struct Avx512 {
  using Vector = __m512i;
  static constexpr int kTokens = 8, kVectors = 2;
  static constexpr std::size_t kLanes = 16;
};

// One way's loops over tiles of tokens × channels, written out per way since an intrinsic may only
// stand in a function of its own instruction set.
#define KVIST_REBUILD(NAME, TARGET, WAY, ZERO, LOAD, STORE, SPREAD, ADD, MADD)                     \
  TARGET inline void NAME(const Region& r, i32* sums, float* x) {                                  \
    constexpr std::size_t step = WAY::kVectors * WAY::kLanes;                                      \
    for (std::size_t token = 0; token < r.tokens; token += WAY::kTokens) {                         \
      std::size_t at[WAY::kTokens];                                                                \
      for (std::size_t t = 0; t < WAY::kTokens; ++t) at[t] = std::min(token + t, r.tokens - 1);    \
      for (std::size_t c = 0; c < r.stride; c += step) {                                           \
        WAY::Vector total[WAY::kTokens][WAY::kVectors];                                            \
        for (auto& row : total)                                                                    \
          for (auto& sum : row) sum = ZERO();                                                      \
        for (std::size_t k = 0; k < r.used; ++k) {                                                 \
          const std::int16_t* const row = r.basis + (r.pairs[k] * r.stride + c) * 2;               \
          const u32* const value = r.packed + k * r.tokens;                                        \
          WAY::Vector part[WAY::kVectors];                                                         \
          for (int v = 0; v < WAY::kVectors; ++v) part[v] = LOAD(row + v * WAY::kLanes * 2);       \
          for (int t = 0; t < WAY::kTokens; ++t) {                                                 \
            const WAY::Vector both = SPREAD(static_cast<int>(value[at[t]]));                       \
            for (int v = 0; v < WAY::kVectors; ++v)                                                \
              total[t][v] = ADD(total[t][v], MADD(part[v], both));                                 \
          }                                                                                        \
        }                                                                                          \
        for (int t = 0; t < WAY::kTokens; ++t)                                                     \
          for (int v = 0; v < WAY::kVectors; ++v)                                                  \
            STORE(sums + t * r.stride + c + v * WAY::kLanes, total[t][v]);                         \
      }                                                                                            \
      for (std::size_t t = 0; t < WAY::kTokens && token + t < r.tokens; ++t)                       \
        finish(r, token + t, sums + t * r.stride, x);                                              \
    }                                                                                              \
  }

#define KVIST_LOAD128(p) _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))
#define KVIST_STORE128(p, v) _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v)
#define KVIST_LOAD256(p) _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
#define KVIST_STORE256(p, v) _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v)

KVIST_REBUILD(rebuild_sse2, , Sse2, _mm_setzero_si128, KVIST_LOAD128, KVIST_STORE128,
              _mm_set1_epi32, _mm_add_epi32, _mm_madd_epi16)
KVIST_REBUILD(rebuild_avx2, __attribute__((target("avx2"))), Avx2, _mm256_setzero_si256,
              KVIST_LOAD256, KVIST_STORE256, _mm256_set1_epi32, _mm256_add_epi32,
              _mm256_madd_epi16)
KVIST_REBUILD(rebuild_avx512, __attribute__((target("avx512f,avx512bw,prefer-vector-width=512"))),
              Avx512, _mm512_setzero_si512, _mm512_loadu_si512, _mm512_storeu_si512,
              _mm512_set1_epi32, _mm512_add_epi32, _mm512_madd_epi16)

#undef KVIST_REBUILD
#undef KVIST_LOAD128
#undef KVIST_STORE128
#undef KVIST_LOAD256
#undef KVIST_STORE256
#endif

#ifdef KVIST_CACHEGEN_VECTORS
__attribute__((target("avx2"))) inline void multiply_avx2(const Product& p) { multiply_all<2>(p); }
__attribute__((target("avx512f,prefer-vector-width=512"))) inline void multiply_avx512(
    const Product& p) {
  multiply_all<8>(p);
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

inline const std::vector<Rebuild>& rebuild_variants() {
  static const std::vector<Rebuild> all = [] {
    std::vector<Rebuild> found{rebuild_portable};
#ifdef KVIST_CACHEGEN_VECTORS
    found.push_back(rebuild_sse2);
    if (__builtin_cpu_supports("avx2")) found.push_back(rebuild_avx2);
    if (__builtin_cpu_supports("avx512bw")) found.push_back(rebuild_avx512);
#endif
    return found;
  }();
  return all;
}

}  // namespace kvist::cachegen
