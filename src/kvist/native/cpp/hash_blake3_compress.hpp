// BLAKE3's compression of one block, in plain C++ and, on x86 with AVX-512, row by row.
//
// Row by row the state is four vectors, and the four G of a half round are done at once. Between
// the halves the rows turn against each other so that diagonals become columns; the row that is
// ready last (b) stays where it is. The message words of a round are one permutation of a vector.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define KVIST_BLAKE3_ROWS 1
#endif

namespace kvist::blake3 {

using Words = std::array<std::uint32_t, 8>;

constexpr Words kIv = {0x6A09E667u, 0xBB67AE85u, 0x3C6EF372u, 0xA54FF53Au,
                       0x510E527Fu, 0x9B05688Cu, 0x1F83D9ABu, 0x5BE0CD19u};

// Row r is the order in which round r reads the message words.
constexpr std::uint8_t kSchedule[7][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1},
    {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4},
    {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13},
};

inline std::uint32_t rotate_right(std::uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }

#define KVIST_BLAKE3_G(a, b, c, d, x, y) \
  do {                                   \
    v[a] += v[b] + (x);                  \
    v[d] = rotate_right(v[d] ^ v[a], 16); \
    v[c] += v[d];                        \
    v[b] = rotate_right(v[b] ^ v[c], 12); \
    v[a] += v[b] + (y);                  \
    v[d] = rotate_right(v[d] ^ v[a], 8); \
    v[c] += v[d];                        \
    v[b] = rotate_right(v[b] ^ v[c], 7); \
  } while (0)

inline Words compress_plain(const Words& cv, const std::uint32_t m[16], std::uint64_t counter,
                            std::uint32_t block_bytes, std::uint32_t flags) {
  std::uint32_t v[16] = {cv[0], cv[1], cv[2], cv[3], cv[4], cv[5], cv[6], cv[7],
                         kIv[0], kIv[1], kIv[2], kIv[3], static_cast<std::uint32_t>(counter),
                         static_cast<std::uint32_t>(counter >> 32), block_bytes, flags};
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC unroll 7
#endif
  for (int r = 0; r < 7; ++r) {
    const std::uint8_t* s = kSchedule[r];
    KVIST_BLAKE3_G(0, 4, 8, 12, m[s[0]], m[s[1]]);
    KVIST_BLAKE3_G(1, 5, 9, 13, m[s[2]], m[s[3]]);
    KVIST_BLAKE3_G(2, 6, 10, 14, m[s[4]], m[s[5]]);
    KVIST_BLAKE3_G(3, 7, 11, 15, m[s[6]], m[s[7]]);
    KVIST_BLAKE3_G(0, 5, 10, 15, m[s[8]], m[s[9]]);
    KVIST_BLAKE3_G(1, 6, 11, 12, m[s[10]], m[s[11]]);
    KVIST_BLAKE3_G(2, 7, 8, 13, m[s[12]], m[s[13]]);
    KVIST_BLAKE3_G(3, 4, 9, 14, m[s[14]], m[s[15]]);
  }
  Words out;
  for (int i = 0; i < 8; ++i) out[i] = v[i] ^ v[i + 8];
  return out;
}

#undef KVIST_BLAKE3_G

#ifdef KVIST_BLAKE3_ROWS
#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // of what GCC's own intrinsics leave undefined
#endif

#define KVIST_ROWS __attribute__((target("avx512f,avx512vl")))

KVIST_ROWS inline __m128i words_at(const std::uint32_t* words) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(words));
}

// The words of each round: x and y of the columns, then of the diagonals from that of b's first.
constexpr std::array<std::array<std::uint32_t, 16>, 7> row_order() {
  constexpr std::uint8_t places[16] = {0, 2, 4, 6, 1, 3, 5, 7, 14, 8, 10, 12, 15, 9, 11, 13};
  std::array<std::array<std::uint32_t, 16>, 7> order{};
  for (std::size_t r = 0; r < 7; ++r) {
    for (std::size_t i = 0; i < 16; ++i) order[r][i] = kSchedule[r][places[i]];
  }
  return order;
}
alignas(64) inline constexpr auto kRowOrder = row_order();

// Half a G of four columns; `kD` and `kB` are how far d and b turn.
template <int kD, int kB>
KVIST_ROWS inline void half_round(__m128i (&row)[4], __m128i message) {
  row[0] = _mm_add_epi32(_mm_add_epi32(row[0], message), row[1]);
  row[3] = _mm_ror_epi32(_mm_xor_si128(row[3], row[0]), kD);
  row[2] = _mm_add_epi32(row[2], row[3]);
  row[1] = _mm_ror_epi32(_mm_xor_si128(row[1], row[2]), kB);
}

KVIST_ROWS inline Words compress_rows(const Words& cv, const std::uint32_t m[16],
                                      std::uint64_t counter, std::uint32_t block_bytes,
                                      std::uint32_t flags) {
  // In quarters, because a key that was just written in quarters cannot be read as a whole at once.
  __m512i message = _mm512_castsi128_si512(words_at(m));
  message = _mm512_inserti32x4(message, words_at(m + 4), 1);
  message = _mm512_inserti32x4(message, words_at(m + 8), 2);
  message = _mm512_inserti32x4(message, words_at(m + 12), 3);
  __m128i row[4] = {words_at(cv.data()), words_at(cv.data() + 4), words_at(kIv.data()),
                    _mm_set_epi32(static_cast<int>(flags), static_cast<int>(block_bytes),
                                  static_cast<int>(counter >> 32), static_cast<int>(counter))};
#if !defined(__clang__)
#pragma GCC unroll 7
#endif
  for (int r = 0; r < 7; ++r) {
    const __m512i words = _mm512_permutexvar_epi32(_mm512_load_si512(kRowOrder[r].data()), message);
    half_round<16, 12>(row, _mm512_castsi512_si128(words));
    half_round<8, 7>(row, _mm512_extracti32x4_epi32(words, 1));
    row[0] = _mm_shuffle_epi32(row[0], _MM_SHUFFLE(2, 1, 0, 3));
    row[3] = _mm_shuffle_epi32(row[3], _MM_SHUFFLE(1, 0, 3, 2));
    row[2] = _mm_shuffle_epi32(row[2], _MM_SHUFFLE(0, 3, 2, 1));
    half_round<16, 12>(row, _mm512_extracti32x4_epi32(words, 2));
    half_round<8, 7>(row, _mm512_extracti32x4_epi32(words, 3));
    row[0] = _mm_shuffle_epi32(row[0], _MM_SHUFFLE(0, 3, 2, 1));
    row[3] = _mm_shuffle_epi32(row[3], _MM_SHUFFLE(1, 0, 3, 2));
    row[2] = _mm_shuffle_epi32(row[2], _MM_SHUFFLE(2, 1, 0, 3));
  }
  Words out;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out.data()), _mm_xor_si128(row[0], row[2]));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out.data() + 4), _mm_xor_si128(row[1], row[3]));
  return out;
}

#undef KVIST_ROWS
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif

using Compress = Words (*)(const Words& cv, const std::uint32_t m[16], std::uint64_t counter,
                           std::uint32_t block_bytes, std::uint32_t flags);

// What this machine can run, the fastest last.
inline const std::vector<Compress>& compress_variants() {
  static const std::vector<Compress> all = [] {
    std::vector<Compress> found{compress_plain};
#ifdef KVIST_BLAKE3_ROWS
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")) {
      found.push_back(compress_rows);
    }
#endif
    return found;
  }();
  return all;
}

}  // namespace kvist::blake3
