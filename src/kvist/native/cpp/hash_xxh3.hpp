// XXH3-64 with seed 0, alone or while copying. Written from the xxHash specification.
//
// Up to 240 bytes are mixed directly. Longer input is read in stripes of 64 bytes into eight
// 64-bit lanes; after 16 stripes the lanes are scrambled; the last 64 bytes are one more stripe.
// `stripes` and `blocks`, which are 16 stripes and a scramble each, are the only hot loops; they exist
// once in plain C++ and twice for x86 vectors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#define KVIST_X86 1
#include <immintrin.h>
#endif

namespace kvist::xxh3 {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr u64 kP32_1 = 0x9E3779B1u, kP32_2 = 0x85EBCA77u, kP32_3 = 0xC2B2AE3Du;
constexpr u64 kP1 = 0x9E3779B185EBCA87u, kP2 = 0xC2B2AE3D27D4EB4Fu, kP3 = 0x165667B19E3779F9u,
              kP4 = 0x85EBCA77C2B2AE63u, kP5 = 0x27D4EB2F165667C5u;

constexpr std::size_t kSecretBytes = 192;
constexpr std::size_t kStripeBytes = 64;
constexpr std::size_t kStripesPerBlock = (kSecretBytes - kStripeBytes) / 8;
constexpr std::size_t kBlockBytes = kStripesPerBlock * kStripeBytes;
constexpr std::size_t kAheadBytes = 2 * kBlockBytes;  // asked of the second cache

alignas(64) constexpr u8 kSecret[] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
static_assert(sizeof kSecret == kSecretBytes, "a byte of the secret is missing");

inline u32 read32(const u8* p) {
  u32 v;
  std::memcpy(&v, p, 4);
  return v;
}
inline u64 read64(const u8* p) {
  u64 v;
  std::memcpy(&v, p, 8);
  return v;
}
inline u64 rotate_left(u64 x, int n) { return (x << n) | (x >> (64 - n)); }

inline u64 multiply_fold(u64 a, u64 b) {
  __extension__ typedef unsigned __int128 u128;
  const u128 product = static_cast<u128>(a) * b;
  return static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
}

inline u64 avalanche(u64 h) {
  h = (h ^ (h >> 37)) * 0x165667919E3779F9u;
  return h ^ (h >> 32);
}

inline u64 avalanche_xxh64(u64 h) {
  h = (h ^ (h >> 33)) * kP2;
  h = (h ^ (h >> 29)) * kP3;
  return h ^ (h >> 32);
}

inline u64 mix16(const u8* in, const u8* secret) {
  return multiply_fold(read64(in) ^ read64(secret), read64(in + 8) ^ read64(secret + 8));
}

inline u64 hash_to_16(const u8* in, std::size_t n) {
  const u8* s = kSecret;
  if (n > 8) {
    const u64 low = read64(in) ^ read64(s + 24) ^ read64(s + 32);
    const u64 high = read64(in + n - 8) ^ read64(s + 40) ^ read64(s + 48);
    return avalanche(n + __builtin_bswap64(low) + high + multiply_fold(low, high));
  }
  if (n >= 4) {
    const u64 both = read32(in + n - 4) + (static_cast<u64>(read32(in)) << 32);
    u64 h = both ^ read64(s + 8) ^ read64(s + 16);
    h ^= rotate_left(h, 49) ^ rotate_left(h, 24);
    h *= 0x9FB21C651E98DF25u;
    h ^= (h >> 35) + n;
    h *= 0x9FB21C651E98DF25u;
    return h ^ (h >> 28);
  }
  if (n > 0) {
    const u32 both = (static_cast<u32>(in[0]) << 16) | (static_cast<u32>(in[n >> 1]) << 24) |
                     in[n - 1] | (static_cast<u32>(n) << 8);
    return avalanche_xxh64(both ^ static_cast<u64>(read32(s) ^ read32(s + 4)));
  }
  return avalanche_xxh64(read64(s + 56) ^ read64(s + 64));
}

inline u64 hash_to_240(const u8* in, std::size_t n) {
  const u8* s = kSecret;
  u64 acc = n * kP1;
  if (n <= 128) {
    for (std::size_t i = (n - 1) / 32 + 1; i-- > 0;) {
      acc += mix16(in + 16 * i, s + 32 * i);
      acc += mix16(in + n - 16 * (i + 1), s + 32 * i + 16);
    }
    return avalanche(acc);
  }
  for (std::size_t i = 0; i < 8; ++i) acc += mix16(in + 16 * i, s + 16 * i);
  acc = avalanche(acc);
  for (std::size_t i = 8; i < n / 16; ++i) acc += mix16(in + 16 * i, s + 16 * (i - 8) + 3);
  acc += mix16(in + n - 16, s + 136 - 17);
  return avalanche(acc);
}

// What becomes of the bytes that are hashed: nothing, a copy, or a copy that is written past the
// caches (`out` is then aligned to 64 bytes), which saves reading every line before it is written.
enum class Copying { kNone, kStore, kStream };

inline void scramble(u64* lanes) {
  for (int i = 0; i < 8; ++i) {
    const u64 v = lanes[i] ^ (lanes[i] >> 47) ^ read64(kSecret + kSecretBytes - 64 + 8 * i);
    lanes[i] = v * kP32_1;
  }
}

// Adds `count` stripes at `in` to the lanes, stripe i with the secret at `secret + 8 i`.
template <Copying How>
void stripes_plain(u64* lanes, const u8* in, u8* out, std::size_t count, const u8* secret) {
  for (std::size_t n = 0; n < count; ++n, in += kStripeBytes, secret += 8) {
    if (How != Copying::kNone) {
      std::memcpy(out, in, kStripeBytes);
      out += kStripeBytes;
    }
    for (int i = 0; i < 8; ++i) {
      const u64 value = read64(in + 8 * i);
      const u64 keyed = value ^ read64(secret + 8 * i);
      lanes[i ^ 1] += value;
      lanes[i] += static_cast<u64>(static_cast<u32>(keyed)) * (keyed >> 32);
    }
  }
}

#ifdef KVIST_X86
template <Copying How>
__attribute__((target("avx2"))) void stripes_avx2(u64* lanes, const u8* in, u8* out,
                                                  std::size_t count, const u8* secret) {
  __m256i acc[2];
  std::memcpy(acc, lanes, 64);
  for (std::size_t n = 0; n < count; ++n, in += kStripeBytes, secret += 8) {
    for (int i = 0; i < 2; ++i) {
      const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in) + i);
      __m256i* const there = reinterpret_cast<__m256i*>(out) + i;
      if (How == Copying::kStore) _mm256_storeu_si256(there, value);
      if (How == Copying::kStream) _mm256_stream_si256(there, value);
      const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret) + i);
      const __m256i keyed = _mm256_xor_si256(value, key);
      const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
      const __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
      acc[i] = _mm256_add_epi64(acc[i], _mm256_add_epi64(product, swapped));
    }
    if (How != Copying::kNone) out += kStripeBytes;
  }
  std::memcpy(lanes, acc, 64);
}

template <Copying How>
__attribute__((target("avx512f"))) void stripes_avx512(u64* lanes, const u8* in, u8* out,
                                                       std::size_t count, const u8* secret) {
  __m512i acc = _mm512_loadu_si512(lanes);
  for (std::size_t n = 0; n < count; ++n, in += kStripeBytes, secret += 8) {
    const __m512i value = _mm512_loadu_si512(in);
    if (How == Copying::kStore) _mm512_storeu_si512(out, value);
    if (How == Copying::kStream) _mm512_stream_si512(reinterpret_cast<__m512i*>(out), value);
    if (How != Copying::kNone) out += kStripeBytes;
    const __m512i keyed = _mm512_xor_si512(value, _mm512_loadu_si512(secret));
    const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
    const __m512i swapped = _mm512_shuffle_epi32(value, _MM_PERM_BADC);
    acc = _mm512_add_epi64(acc, _mm512_add_epi64(product, swapped));
  }
  _mm512_storeu_si512(lanes, acc);
}

// The lanes and the secrets of all 16 stripes stay in registers.
template <Copying How>
__attribute__((target("avx512f"))) void blocks_avx512(u64* lanes, const u8* in, u8* out,
                                                      std::size_t count) {
  __m512i acc = _mm512_loadu_si512(lanes);
  __m512i secrets[kStripesPerBlock];
  for (std::size_t n = 0; n < kStripesPerBlock; ++n) {
    secrets[n] = _mm512_loadu_si512(kSecret + 8 * n);
  }
  const __m512i last = _mm512_loadu_si512(kSecret + kSecretBytes - kStripeBytes);
  const __m512i prime = _mm512_set1_epi32(static_cast<int>(kP32_1));
  for (; count > 0; --count, in += kBlockBytes) {
#pragma GCC unroll 16
    for (std::size_t n = 0; n < kStripesPerBlock; ++n) {
      const __m512i value = _mm512_loadu_si512(in + n * kStripeBytes);
      if (How == Copying::kNone) {
        _mm_prefetch(reinterpret_cast<const char*>(in + n * kStripeBytes + kAheadBytes),
                     _MM_HINT_T0);
      }
      if (How == Copying::kStore) _mm512_storeu_si512(out, value);
      if (How == Copying::kStream) _mm512_stream_si512(reinterpret_cast<__m512i*>(out), value);
      if (How != Copying::kNone) out += kStripeBytes;
      const __m512i keyed = _mm512_xor_si512(value, secrets[n]);
      const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
      const __m512i swapped = _mm512_shuffle_epi32(value, _MM_PERM_BADC);
      acc = _mm512_add_epi64(acc, _mm512_add_epi64(product, swapped));
    }
    const __m512i mixed =
        _mm512_xor_si512(_mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47)), last);
    const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
    acc = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
  }
  _mm512_storeu_si512(lanes, acc);
}
#endif

template <Copying How, void (*Add)(u64*, const u8*, u8*, std::size_t, const u8*)>
void blocks_of(u64* lanes, const u8* in, u8* out, std::size_t count) {
  for (; count > 0; --count, in += kBlockBytes) {
    Add(lanes, in, out, kStripesPerBlock, kSecret);
    scramble(lanes);
    if (How != Copying::kNone) out += kBlockBytes;
  }
}

// Of one kind of machine: `blocks` adds whole blocks.
struct Loops {
  void (*stripes)(u64*, const u8*, u8*, std::size_t, const u8*);
  void (*blocks)(u64*, const u8*, u8*, std::size_t);
};

// The variants that this machine can run, the fastest last.
template <Copying How>
std::vector<Loops> loop_variants() {
  std::vector<Loops> out{{stripes_plain<How>, blocks_of<How, stripes_plain<How>>}};
#ifdef KVIST_X86
  if (__builtin_cpu_supports("avx2")) {
    out.push_back({stripes_avx2<How>, blocks_of<How, stripes_avx2<How>>});
  }
  if (__builtin_cpu_supports("avx512f")) out.push_back({stripes_avx512<How>, blocks_avx512<How>});
#endif
  return out;
}

template <Copying How>
Loops best_loops() {
  static const Loops loops = loop_variants<How>().back();
  return loops;
}

inline bool can_stream(const u8* out) { return reinterpret_cast<std::uintptr_t>(out) % 64 == 0; }

// Makes stores that went past the caches visible to whoever is told of them next.
inline void end_streams() {
#ifdef KVIST_X86
  _mm_sfence();
#endif
}

// XXH3-64 of more than 240 bytes that are met from the first to the last, but need not be there yet
// when it begins. `data` is where all of them stand when `finish` is called.
class Running {
 public:
  Running(const u8* data, std::size_t bytes, Loops loops = best_loops<Copying::kNone>())
      : data_(data), bytes_(bytes), loops_(loops) {}

  // How many bytes were hashed: a multiple of a block.
  std::size_t position() const { return hashed_; }

  // Hashes what it can of the first `filled` bytes, which are there.
  void advance(std::size_t filled) {
    const std::size_t whole = std::min(filled, bytes_ - 1) / kBlockBytes * kBlockBytes;
    if (whole > hashed_) add(loops_, data_ + hashed_, nullptr, whole - hashed_);
  }

  // Copies the `n` bytes at `position()` from `in` to `out` and hashes what it can of them;
  // `data` is to be one of both. The rest of them is copied, not hashed.
  void copy(Loops loops, u8* out, const u8* in, std::size_t n) {
    const std::size_t done = std::min(n, bytes_ - 1 - hashed_) / kBlockBytes * kBlockBytes;
    add(loops, in, out, done);
    std::memcpy(out + done, in + done, n - done);
  }

  // All bytes are there.
  u64 finish() {
    advance(bytes_);
    loops_.stripes(lanes_, data_ + hashed_, nullptr, (bytes_ - 1 - hashed_) / kStripeBytes,
                   kSecret);
    loops_.stripes(lanes_, data_ + bytes_ - kStripeBytes, nullptr, 1,
                   kSecret + kSecretBytes - kStripeBytes - 7);
    u64 h = bytes_ * kP1;
    for (int i = 0; i < 4; ++i) {
      const u8* s = kSecret + 11 + 16 * i;
      h += multiply_fold(lanes_[2 * i] ^ read64(s), lanes_[2 * i + 1] ^ read64(s + 8));
    }
    return avalanche(h);
  }

 private:
  void add(Loops loops, const u8* in, u8* out, std::size_t bytes) {
    loops.blocks(lanes_, in, out, bytes / kBlockBytes);
    hashed_ += bytes;
  }

  const u8* data_;
  std::size_t bytes_;
  Loops loops_;
  std::size_t hashed_ = 0;
  alignas(64) u64 lanes_[8] = {kP32_3, kP1, kP2, kP3, kP4, kP32_2, kP5, kP32_1};
};

inline u64 checksum(const u8* in, std::size_t n) {
  if (n <= 16) return hash_to_16(in, n);
  if (n <= 240) return hash_to_240(in, n);
  return Running(in, n).finish();
}

// `in` and `out` must not overlap; more than 240 bytes.
inline u64 copy_checksum_with(Loops loops, u8* out, const u8* in, std::size_t n) {
  Running hash(in, n);
  hash.copy(loops, out, in, n);
  return hash.finish();
}

// `in` and `out` must not overlap.
inline u64 copy_checksum(u8* out, const u8* in, std::size_t n) {
  if (n <= 240) {
    if (n != 0) std::memcpy(out, in, n);
    return checksum(in, n);
  }
  if (!can_stream(out)) return copy_checksum_with(best_loops<Copying::kStore>(), out, in, n);
  const u64 sum = copy_checksum_with(best_loops<Copying::kStream>(), out, in, n);
  end_streams();
  return sum;
}

}  // namespace kvist::xxh3
