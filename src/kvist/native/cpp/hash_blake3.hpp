// BLAKE3-256 of bytes that lie in one piece. Written from the BLAKE3 paper (section 2); one block
// at a time, because keys are short (a block of 16 tokens is 96 bytes) and a chain is sequential.
//
// A chunk is 1024 bytes, a block 64. A tree of chunks is split so that the left subtree holds the
// largest power of two of chunks that leaves at least one byte to the right one. Only the last
// compression, that of the root, carries the flag kRoot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hash_blake3_compress.hpp"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "keys and blocks are little-endian");

namespace kvist::blake3 {

constexpr std::size_t kBlockBytes = 64;
constexpr std::size_t kChunkBytes = 1024;
constexpr std::uint32_t kChunkStart = 1, kChunkEnd = 2, kParent = 4, kRoot = 8;

// A compression not yet done: whether it is the root's is known only by the caller.
struct Pending {
  Words cv;
  std::uint32_t block[16];
  std::uint64_t counter;
  std::uint32_t block_bytes;
  std::uint32_t flags;

  Words finish(Compress compress, std::uint32_t more_flags = 0) const {
    return compress(cv, block, counter, block_bytes, flags | more_flags);
  }
};

inline Pending chunk(Compress compress, const std::uint8_t* data, std::size_t bytes,
                     std::uint64_t index) {
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

inline Pending subtree(Compress compress, const std::uint8_t* data, std::size_t bytes,
                       std::uint64_t first_chunk) {
  if (bytes <= kChunkBytes) return chunk(compress, data, bytes, first_chunk);
  std::size_t left = kChunkBytes;
  while (left * 2 < bytes) left *= 2;
  const Pending head = subtree(compress, data, left, first_chunk);
  const Pending tail =
      subtree(compress, data + left, bytes - left, first_chunk + left / kChunkBytes);
  const Words l = head.finish(compress), r = tail.finish(compress);
  Pending p{kIv, {}, 0, kBlockBytes, kParent};
  std::memcpy(p.block, l.data(), 32);
  std::memcpy(p.block + 8, r.data(), 32);
  return p;
}

inline void digest_with(Compress compress, const std::uint8_t* data, std::size_t bytes,
                        std::uint8_t out[32]) {
  const Words root = subtree(compress, data, bytes, 0).finish(compress, kRoot);
  std::memcpy(out, root.data(), 32);
}

inline void digest(const std::uint8_t* data, std::size_t bytes, std::uint8_t out[32]) {
  static const Compress best = compress_variants().back();
  digest_with(best, data, bytes, out);
}

}  // namespace kvist::blake3
