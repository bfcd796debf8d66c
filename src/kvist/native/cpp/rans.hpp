// Range coding by asymmetric numeral systems: bytes → words, with static tables of 12-bit
// probabilities and 32 interleaved states, so that a vector unit decodes them side by side.
//
// One stream holds many *runs*, each with a table of its own: a table is changed without ending the
// stream. A run's symbol i belongs to lane i % 32. Encoding goes backwards: the last run first, and
// within `Encoder::run` the last symbol first.
//
// Stream: the 32 states (u32, little-endian) as the decoder begins, then 16-bit words in the order
// in which it needs them. A decoder that has read everything has used every word and stands at
// kLow in every lane: that is how `ended` tells a good stream from another.
//
// Nothing here trusts a stream: reads are bounded, and a table is built only from frequencies that
// add up. `kvist/native/rans_twin.py` is the specification.
//
// Source: J. Duda, "Asymmetric numeral systems", arXiv:1311.2540; interleaving after F. Giesen,
// "Interleaved entropy coders", arXiv:1402.3392.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "rans_encode.hpp"

namespace kvist::rans {

constexpr std::size_t kStateBytes = kLanes * sizeof(u32);

// Counts → frequencies that add up to kScale, at least 1 where a symbol occurs at all. Integers
// only, so every implementation gives the same. At least one count is above 0.
inline Frequencies normalise(const u64* counts) {
  u64 total = 0;
  for (std::size_t s = 0; s < kSymbols; ++s) total += counts[s];
  Frequencies out;
  std::int64_t left = kScale;
  for (std::size_t s = 0; s < kSymbols; ++s) {
    if (counts[s] == 0) continue;
    out.of[s] = static_cast<u16>(std::max<u64>(1, (2 * counts[s] * kScale + total) / (2 * total)));
    left -= out.of[s];
  }
  while (left != 0) {  // the most frequent bears what rounding left; ties: the least symbol
    u16* const most = std::max_element(out.of, out.of + kSymbols);
    const std::int64_t part = std::max<std::int64_t>(left, -((*most + 7) / 8));
    *most = static_cast<u16>(*most + part);
    left -= part;
  }
  return out;
}

// log2 of 1 ≤ value < 2^31 in 1/256, rounded down. Integers only.
inline u32 log2_q8(u32 value) {
  unsigned whole = 0;
  while (value >> (whole + 1) != 0) ++whole;
  u64 mantissa = u64{value} << (31 - whole);
  u32 out = whole << 8;
  for (int bit = 7; bit >= 0; --bit) {
    mantissa = (mantissa * mantissa) >> 31;
    if (mantissa >> 32 != 0) {
      mantissa >>= 1;
      out |= 1u << bit;
    }
  }
  return out;
}

// Bits in 1/256 that a symbol takes, by its frequency.
inline const u16* costs_q8() {
  static const std::vector<u16> all = [] {
    std::vector<u16> costs(kScale + 1);
    for (u32 f = 1; f <= kScale; ++f) {
      costs[f] = static_cast<u16>((kScaleBits << 8) - log2_q8(f));
    }
    return costs;
  }();
  return all.data();
}

// Bytes that symbols with these counts take, about: rounded up, without states and table.
inline u64 cost_bytes(const u64* counts, const Frequencies& frequencies) {
  u64 cost = 0;  // in 1/256 bit
  const u16* const costs = costs_q8();
  for (std::size_t s = 0; s < kSymbols; ++s) {
    if (counts[s] != 0) cost += counts[s] * costs[frequencies.of[s]];
  }
  return (cost + 2047) / 2048;
}

// Writes a stream from its end. The caller gives every symbol a frequency from 1 to kScale - 1.
class Encoder {
 public:
  // `most` is the number of symbols that will come at most.
  explicit Encoder(std::size_t most, EncodeRounds rounds = best_encode())
      : rounds_(rounds), size_(most * 2 + kStateBytes + kFrontBytes), buffer_(new u8[size_]) {
    std::fill(states_, states_ + kLanes, kLow);
    at_ = buffer_.get() + size_;
  }

  void run(const EncodeTable& table, const u8* symbols, std::size_t count) {
    const std::size_t whole = count / kLanes * kLanes;
    for (std::size_t i = count; i-- > whole;) encode_step(table, symbols[i], states_[i - whole], at_);
    rounds_(table, symbols, states_, at_, count / kLanes);
  }

  // Ends the stream; it lies in `data`, `bytes` long, while this lives.
  void finish() {
    at_ -= kStateBytes;
    std::memcpy(at_, states_, kStateBytes);
  }
  const u8* data() const { return at_; }
  std::size_t bytes() const { return static_cast<std::size_t>(buffer_.get() + size_ - at_); }

 private:
  EncodeRounds rounds_;
  std::size_t size_;
  std::unique_ptr<u8[]> buffer_;
  u8* at_;
  alignas(64) u32 states_[kLanes];
};

// What decoding needs: for each value of a state's low bits its symbol, frequency and offset.
class DecodeTable {
 public:
  // Whether the frequencies can be those of a stream: all below kScale, together kScale.
  bool build(const Frequencies& frequencies) {
    u32 at = 0;
    for (u32 s = 0; s < kSymbols; ++s) {
      const u32 f = frequencies.of[s];
      if (f >= kScale || f > kScale - at) return false;
      for (u32 i = 0; i < f; ++i) slots_[at + i] = s | f << 8 | i << 20;
      at += f;
    }
    return at == kScale;
  }
  const u32* slots() const { return slots_; }

 private:
  alignas(64) u32 slots_[kScale];
};

// Reads a stream, run by run.
class Decoder {
 public:
  Decoder(const u8* data, std::size_t bytes, Rounds rounds = best_rounds())
      : rounds_(rounds), at_(data), end_(data + bytes) {
    good_ = bytes >= kStateBytes && bytes % 2 == 0;
    if (!good_) return;
    std::memcpy(states_, data, kStateBytes);
    at_ += kStateBytes;
  }

  // The next `count` symbols; false if the stream ends before.
  bool run(const DecodeTable& table, u8* out, std::size_t count) {
    if (!good_) return false;
    std::size_t done = rounds_(table.slots(), states_, at_, end_, out, count / kLanes) * kLanes;
    for (; done < count; ++done) {
      u32& state = states_[done % kLanes];
      out[done] = step(table.slots(), state);
      if (state >= kLow) continue;
      if (at_ == end_) return good_ = false;
      state = refill(state, at_);
    }
    return true;
  }

  // Whether the stream was read to its end, and is one that an encoder made.
  bool ended() const {
    return good_ && at_ == end_ &&
           std::all_of(states_, states_ + kLanes, [](u32 state) { return state == kLow; });
  }

 private:
  Rounds rounds_;
  const u8* at_;
  const u8* end_;
  bool good_;
  alignas(64) u32 states_[kLanes];
};

// ---- tables as bytes: which symbols occur (256 bits), then their frequencies, 12 bits each -------

inline std::size_t table_bytes(const Frequencies& frequencies) {
  const auto unused = std::count(frequencies.of, frequencies.of + kSymbols, 0);
  return kSymbols / 8 + ((kSymbols - static_cast<std::size_t>(unused)) * 3 + 1) / 2;
}

// Writes `table_bytes(frequencies)` zeroed bytes, each frequency being below kScale.
inline void pack(const Frequencies& frequencies, u8* out) {
  u8* const values = out + kSymbols / 8;
  std::size_t nibble = 0;
  for (std::size_t s = 0; s < kSymbols; ++s) {
    if (frequencies.of[s] == 0) continue;
    out[s / 8] = static_cast<u8>(out[s / 8] | 1u << (s % 8));
    for (int part = 0; part < 3; ++part, ++nibble) {
      const u32 value = (frequencies.of[s] >> (4 * part)) & 15u;
      values[nibble / 2] = static_cast<u8>(values[nibble / 2] | value << (4 * (nibble % 2)));
    }
  }
}

// Reads a table from at most `bytes` bytes; 0 if they hold none, else how many it took.
inline std::size_t unpack(const u8* in, std::size_t bytes, Frequencies& out) {
  if (bytes < kSymbols / 8) return 0;
  std::size_t nibble = 0;
  const u8* const values = in + kSymbols / 8;
  for (std::size_t s = 0; s < kSymbols; ++s) {
    out.of[s] = 0;
    if ((in[s / 8] >> (s % 8) & 1) == 0) continue;
    for (int part = 0; part < 3; ++part, ++nibble) {
      if (kSymbols / 8 + nibble / 2 >= bytes) return 0;
      const u32 value = values[nibble / 2] >> (4 * (nibble % 2)) & 15u;
      out.of[s] = static_cast<u16>(out.of[s] | value << (4 * part));
    }
    if (out.of[s] == 0) return 0;
  }
  return kSymbols / 8 + (nibble + 1) / 2;
}

}  // namespace kvist::rans
