// BLAKE3-256 of bytes that lie in one piece. Written from the BLAKE3 paper (section 2); scalar,
// because keys are short (a block of 16 tokens is 96 bytes) and a chain of keys is sequential.
//
// A chunk is 1024 bytes, a block 64. A tree of chunks is split so that the left subtree holds the
// largest power of two of chunks that leaves at least one byte to the right one. Only the last
// compression, that of the root, carries the flag kRoot.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "keys and blocks are little-endian");

namespace kvist::blake3 {

constexpr std::size_t kBlockBytes = 64;
constexpr std::size_t kChunkBytes = 1024;
constexpr std::uint32_t kChunkStart = 1, kChunkEnd = 2, kParent = 4, kRoot = 8;

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

inline Words compress(const Words& cv, const std::uint32_t m[16], std::uint64_t counter,
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

// A compression not yet done: whether it is the root's is known only by the caller.
struct Pending {
  Words cv;
  std::uint32_t block[16];
  std::uint64_t counter;
  std::uint32_t block_bytes;
  std::uint32_t flags;

  Words finish(std::uint32_t more_flags = 0) const {
    return compress(cv, block, counter, block_bytes, flags | more_flags);
  }
};

inline Pending chunk(const std::uint8_t* data, std::size_t bytes, std::uint64_t index) {
  Pending p{kIv, {}, index, 0, kChunkStart};
  while (bytes > kBlockBytes) {
    std::memcpy(p.block, data, kBlockBytes);
    p.cv = compress(p.cv, p.block, index, kBlockBytes, p.flags);
    p.flags = 0;
    data += kBlockBytes;
    bytes -= kBlockBytes;
  }
  std::memset(p.block, 0, sizeof p.block);
  if (bytes != 0) std::memcpy(p.block, data, bytes);
  p.block_bytes = static_cast<std::uint32_t>(bytes);
  p.flags |= kChunkEnd;
  return p;
}

inline Pending subtree(const std::uint8_t* data, std::size_t bytes, std::uint64_t first_chunk) {
  if (bytes <= kChunkBytes) return chunk(data, bytes, first_chunk);
  std::size_t left = kChunkBytes;
  while (left * 2 < bytes) left *= 2;
  const Words l = subtree(data, left, first_chunk).finish();
  const Words r = subtree(data + left, bytes - left, first_chunk + left / kChunkBytes).finish();
  Pending p{kIv, {}, 0, kBlockBytes, kParent};
  std::memcpy(p.block, l.data(), 32);
  std::memcpy(p.block + 8, r.data(), 32);
  return p;
}

inline void digest(const std::uint8_t* data, std::size_t bytes, std::uint8_t out[32]) {
  const Words root = subtree(data, bytes, 0).finish(kRoot);
  std::memcpy(out, root.data(), 32);
}

}  // namespace kvist::blake3
