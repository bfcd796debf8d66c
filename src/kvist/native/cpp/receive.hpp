// A block out of a socket, its checksum taken piece by piece while the bytes are still in a cache.
#pragma once

#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <system_error>

#include "hash_xxh3.hpp"

namespace kvist::net {

// Fits into a core's second cache beside what the kernel reads it from.
constexpr std::size_t kPieceBytes = std::size_t{256} << 10;

struct Received {
  std::size_t bytes;       // fewer than asked for: the other side hung up
  std::uint64_t checksum;  // of all bytes, if all are there
};

using Clock = std::chrono::steady_clock;

// Lets the next call on `fd` block until `until` at most.
inline void limit(int fd, Clock::time_point until) {
  const auto left =
      std::chrono::duration_cast<std::chrono::microseconds>(until - Clock::now()).count();
  if (left <= 0) throw std::system_error(ETIMEDOUT, std::generic_category());
  timeval time{};
  time.tv_sec = static_cast<time_t>(left / 1000000);
  time.tv_usec = static_cast<suseconds_t>(left % 1000000);
  if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time) != 0) {
    throw std::system_error(errno, std::generic_category());
  }
}

// Fills `out` from a blocking stream socket. Throws `system_error`: ETIMEDOUT if it is not full by
// `until`, else what the socket says.
inline Received receive(int fd, std::uint8_t* out, std::size_t bytes, Clock::time_point until) {
  xxh3::Running hash(out, bytes);
  std::size_t filled = 0;
  while (filled < bytes) {
    limit(fd, until);
    const std::size_t piece = std::min(kPieceBytes, bytes - filled);
    const ssize_t count = recv(fd, out + filled, piece, MSG_WAITALL);
    if (count == 0) return {filled, 0};
    if (count > 0) {
      filled += static_cast<std::size_t>(count);
      hash.advance(filled);
    } else if (errno != EAGAIN && errno != EINTR) {
      throw std::system_error(errno, std::generic_category());
    }
  }
  return {filled, bytes > 240 ? hash.finish() : xxh3::checksum(out, bytes)};
}

}  // namespace kvist::net
