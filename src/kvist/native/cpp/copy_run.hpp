// Copies runs of bytes past the caches: memory that nobody reads soon need not be read before it is
// written, as an ordinary store does, nor push out what somebody does read.
//
// Whoever tells another thread of such a copy calls `xxh3::end_streams` before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define KVIST_STREAMS
#include <immintrin.h>
#endif

namespace kvist::pages {

using u8 = std::uint8_t;

namespace copy_run {

using Copy = void (*)(u8*, const u8*, std::size_t);

constexpr std::size_t kLineBytes = 64;
constexpr std::size_t kLeastBytes = 256;  // shorter runs gain nothing

inline void plain(u8* out, const u8* in, std::size_t bytes) { std::memcpy(out, in, bytes); }

#ifdef KVIST_STREAMS
inline bool suits(const u8* out, std::size_t bytes) {
  return bytes >= kLeastBytes && bytes % kLineBytes == 0 &&
         reinterpret_cast<std::uintptr_t>(out) % kLineBytes == 0;
}

__attribute__((target("avx2"))) inline void stream_avx2(u8* out, const u8* in,
                                                        std::size_t bytes) {
  if (!suits(out, bytes)) return plain(out, in, bytes);
  for (std::size_t i = 0; i < bytes; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i)));
  }
}

__attribute__((target("avx512f"))) inline void stream_avx512(u8* out, const u8* in,
                                                             std::size_t bytes) {
  if (!suits(out, bytes)) return plain(out, in, bytes);
  for (std::size_t i = 0; i < bytes; i += kLineBytes) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), _mm512_loadu_si512(in + i));
  }
}
#endif

// The best that this machine can do.
inline Copy streaming() {
  static const Copy best = [] {
#ifdef KVIST_STREAMS
    if (__builtin_cpu_supports("avx512f")) return Copy(stream_avx512);
    if (__builtin_cpu_supports("avx2")) return Copy(stream_avx2);
#endif
    return Copy(plain);
  }();
  return best;
}

}  // namespace copy_run
}  // namespace kvist::pages
