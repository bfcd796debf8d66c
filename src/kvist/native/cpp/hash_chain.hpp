// Keys of a chain: key_i = BLAKE3(key_{i-1} ‖ tokens_i ‖ extra_i), tokens as little-endian u32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "hash_blake3.hpp"

namespace kvist {

constexpr std::size_t kChainKeyBytes = 32;

// `extras` is empty, or has one for each block; `keys` has room for all.
inline void hash_chain(const std::uint8_t* seed, const std::uint8_t* token_bytes,
                       std::size_t blocks, std::size_t block_tokens,
                       const std::vector<std::string_view>& extras, std::uint8_t* keys) {
  const std::size_t block_bytes = block_tokens * sizeof(std::uint32_t);
  std::vector<std::uint8_t> message;
  const std::uint8_t* previous = seed;
  for (std::size_t i = 0; i < blocks; ++i) {
    const std::string_view extra = extras.empty() ? std::string_view() : extras[i];
    message.resize(kChainKeyBytes + block_bytes + extra.size());
    std::memcpy(message.data(), previous, kChainKeyBytes);
    std::memcpy(message.data() + kChainKeyBytes, token_bytes + i * block_bytes, block_bytes);
    if (!extra.empty()) {
      std::memcpy(message.data() + kChainKeyBytes + block_bytes, extra.data(), extra.size());
    }
    std::uint8_t* key = keys + i * kChainKeyBytes;
    blake3::digest(message.data(), message.size(), key);
    previous = key;
  }
}

}  // namespace kvist
