// The tokens of a KV event: a MessagePack array of integers -> u32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvist {

// Reads numbers of a MessagePack text; each call leaves `at` behind what it read.
class MsgpackReader {
 public:
  MsgpackReader(const std::uint8_t* at, std::size_t bytes) : at_(at), end_(at + bytes) {}

  bool done() const { return at_ == end_; }

  // The head of an array: how many items follow.
  bool array(std::uint64_t& count) {
    std::uint8_t head;
    if (!byte(head)) return false;
    if (head >> 4 == 0x9) {
      count = head & 0xf;
      return true;
    }
    if (head == 0xdc) return big_endian(2, count);
    return head == 0xdd && big_endian(4, count);
  }

  // An integer of 0 or more; others are refused.
  bool integer(std::uint64_t& value) {
    std::uint8_t head;
    if (!byte(head)) return false;
    if (head < 0x80) {
      value = head;
      return true;
    }
    if (head >= 0xcc && head <= 0xcf) return big_endian(std::size_t{1} << (head - 0xcc), value);
    if (head < 0xd0 || head > 0xd3) return false;
    const std::size_t bytes = std::size_t{1} << (head - 0xd0);
    return big_endian(bytes, value) && value >> (8 * bytes - 1) == 0;
  }

 private:
  bool byte(std::uint8_t& value) {
    if (at_ == end_) return false;
    value = *at_++;
    return true;
  }

  bool big_endian(std::size_t bytes, std::uint64_t& value) {
    if (static_cast<std::size_t>(end_ - at_) < bytes) return false;
    value = 0;
    for (std::size_t i = 0; i < bytes; ++i) value = value << 8 | *at_++;
    return true;
  }

  const std::uint8_t* at_;
  const std::uint8_t* end_;
};

// Whether it was an array of integers in the range of u32, and nothing else.
inline bool unpack_tokens(const std::uint8_t* packed, std::size_t bytes,
                          std::vector<std::uint32_t>& tokens) {
  MsgpackReader reader(packed, bytes);
  std::uint64_t count = 0;
  if (!reader.array(count) || count > bytes) return false;
  tokens.reserve(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    std::uint64_t token = 0;
    if (!reader.integer(token) || token > 0xffffffffULL) return false;
    tokens.push_back(static_cast<std::uint32_t>(token));
  }
  return reader.done();
}

}  // namespace kvist
