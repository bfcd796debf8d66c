// The answers to a request for blocks, out of a socket into the slots that they are for: many in
// one call, each hashed piece by piece while its bytes are still in a cache.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "hash_xxh3.hpp"

namespace kvist::net {

// Fits into a core's second cache beside what the kernel reads it from.
constexpr std::size_t kPieceBytes = std::size_t{256} << 10;
constexpr std::size_t kKeyBytes = 32;

// As it stands on the wire: little-endian, nothing between the fields.
struct Header {
  std::uint32_t index, status;
  std::uint64_t bytes, checksum;
  std::uint8_t key[kKeyBytes];
};
static_assert(sizeof(Header) == 56, "a header has 56 bytes");

struct Position {
  std::uint64_t incarnation, number;
};

enum class Found { kMiss, kHit, kDamaged };

struct Answer {
  std::size_t index;
  Found found;
  std::optional<Position> at;  // of a miss: as of when there is surely no such block
};

struct Slot {
  std::uint8_t* data;
  std::size_t bytes;
  std::uint8_t key[kKeyBytes];
  bool open = true;  // not answered yet
};

// The other side has broken a rule.
struct RuleError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Clock = std::chrono::steady_clock;

[[noreturn]] inline void fail(int code) {
  throw std::system_error(code, std::generic_category());
}

// Lets the next call on `fd` block until `until` at most. Throws ETIMEDOUT if that is over.
inline void limit(int fd, Clock::time_point until) {
  const auto left =
      std::chrono::duration_cast<std::chrono::microseconds>(until - Clock::now()).count();
  if (left <= 0) fail(ETIMEDOUT);
  timeval time{};
  time.tv_sec = static_cast<time_t>(left / 1000000);
  time.tv_usec = static_cast<suseconds_t>(left % 1000000);
  if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time) != 0) fail(errno);
}

// Whether a call that failed just now is to be made again: `limit` says for how long.
inline bool again() { return errno == EAGAIN || errno == EINTR; }

// Whether something is there before `until`, or an error.
inline bool readable(int fd, Clock::time_point until) {
  const auto left =
      std::chrono::duration_cast<std::chrono::nanoseconds>(until - Clock::now()).count();
  if (left <= 0) return false;
  const timespec time{static_cast<time_t>(left / 1000000000), static_cast<long>(left % 1000000000)};
  pollfd wanted{fd, POLLIN, 0};
  return ppoll(&wanted, 1, &time, nullptr) > 0;
}

// Fills `out` from a blocking stream socket and hashes it. Throws `system_error`: ETIMEDOUT if it
// is not full by `until`, ECONNRESET if the other side hangs up, else what the socket says.
inline std::uint64_t receive(int fd, std::uint8_t* out, std::size_t bytes,
                             Clock::time_point until) {
  xxh3::Running hash(out, bytes);
  std::size_t filled = 0;
  while (filled < bytes) {
    limit(fd, until);
    const std::size_t piece = std::min(kPieceBytes, bytes - filled);
    const ssize_t count = recv(fd, out + filled, piece, MSG_WAITALL);
    if (count == 0) fail(ECONNRESET);
    if (count > 0) {
      filled += static_cast<std::size_t>(count);
      if (bytes > 240) hash.advance(filled);
    } else if (!again()) {
      fail(errno);
    }
  }
  return bytes > 240 ? hash.finish() : xxh3::checksum(out, bytes);
}

// Of one request. Not thread-safe; after an error it is of no use.
class Answers {
 public:
  explicit Answers(std::vector<Slot> slots) : slots_(std::move(slots)), left_(slots_.size()) {}

  // How many blocks are not answered yet.
  std::size_t left() const { return left_; }

  // Adds what is answered to `out`; see `answers_twin.Answers.take`. What came before an error is
  // returned, and the error thrown by the next call.
  void take(int fd, Clock::time_point until, Clock::duration each, Clock::duration tell,
            std::vector<Answer>& out) {
    const auto told = Clock::now() + tell;
    while (left_ > 0) {
      try {
        if (failure_) std::rethrow_exception(failure_);
        if (!out.empty() && !readable(fd, told)) return;
        out.push_back(one(fd, std::min(until, Clock::now() + each)));
      } catch (const std::exception&) {
        if (out.empty()) throw;
        failure_ = std::current_exception();
        return;
      }
    }
  }

 private:
  Answer one(int fd, Clock::time_point until) {
    Header header;
    receive(fd, reinterpret_cast<std::uint8_t*>(&header), sizeof header, until);
    Slot* const slot = header.index < slots_.size() ? &slots_[header.index] : nullptr;
    if (slot == nullptr || !slot->open || std::memcmp(slot->key, header.key, kKeyBytes) != 0) {
      throw RuleError("block " + std::to_string(header.index) +
                      " was not asked for, or came before");
    }
    Answer answer{header.index, Found::kMiss, std::nullopt};
    if (header.status == 0 && header.bytes == sizeof(Position)) {
      Position at;
      receive(fd, reinterpret_cast<std::uint8_t*>(&at), sizeof at, until);
      answer.at = at;
    } else if (header.status == 1 && header.bytes == slot->bytes) {
      const bool same = receive(fd, slot->data, slot->bytes, until) == header.checksum;
      answer.found = same ? Found::kHit : Found::kDamaged;
    } else if (header.status != 0 || header.bytes != 0) {
      throw RuleError("a block of " + std::to_string(header.bytes) + " bytes in place of " +
                      std::to_string(slot->bytes));
    }
    slot->open = false;
    --left_;
    return answer;
  }

  std::vector<Slot> slots_;
  std::size_t left_;
  std::exception_ptr failure_;
};

}  // namespace kvist::net
