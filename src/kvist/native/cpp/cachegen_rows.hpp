// Rows of integers ↔ a rANS stream and a list of escapes; `kvist/native/cachegen_twin.py` says how.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <vector>

#include "rans.hpp"

namespace kvist::cachegen {

using i32 = std::int32_t;
using rans::u16;
using rans::u32;
using rans::u8;

constexpr u32 kMiddle = 128;
constexpr unsigned kMaxShift = 7;

struct Coded {
  std::vector<u8> stream;
  std::vector<i32> escapes;
};

// What a stream held: symbols `[position][tokens]`, and for each position its first escape.
struct Symbols {
  std::vector<u8> high, low;
  std::vector<u32> first_escape;
};

class RowCoder {
 public:
  RowCoder(const u8* frequencies, std::size_t classes, const u8* row_class, const u8* row_shift,
           std::size_t rows)
      : shift_(row_shift, row_shift + rows), high_at_(rows), low_at_(rows) {
    if (rows == 0) throw std::invalid_argument("classes and shifts are of different rows");
    std::map<u32, std::vector<u32>> high, low;
    for (std::size_t row = 0; row < rows; ++row) {
      if (row_class[row] >= classes || row_shift[row] > kMaxShift) {
        throw std::invalid_argument("a row's class or shift is out of range");
      }
      high[row_class[row]].push_back(static_cast<u32>(row));
      if (row_shift[row] != 0) low[row_shift[row]].push_back(static_cast<u32>(row));
    }
    for (std::size_t c = 0; c < classes; ++c) check(read(frequencies, c));
    for (auto& [cls, members] : high) add(high_, members, read(frequencies, cls), high_at_);
    for (auto& [shift, members] : low) add(low_, members, uniform(shift), low_at_);
  }

  std::size_t rows() const { return shift_.size(); }
  unsigned shift(std::size_t row) const { return shift_[row]; }
  u32 high_at(std::size_t row) const { return high_at_[row]; }
  u32 low_at(std::size_t row) const { return low_at_[row]; }

  // Values `[rows][tokens]`; there is one token at least. `scratch` is written over.
  Coded encode(const i32* values, std::size_t tokens, Symbols& scratch) const {
    Coded out;
    std::vector<u8>&high = scratch.high, &low = scratch.low;
    high.resize(rows() * tokens);
    low.resize(low_rows() * tokens);
    for (const Run& run : high_) {
      for (const u32 row : run.members) {
        split(run, values + row * tokens, row, tokens, high.data() + high_at_[row] * tokens,
              shift_[row] == 0 ? nullptr : low.data() + low_at_[row] * tokens, out.escapes);
      }
    }
    rans::Encoder coder(high.size() + low.size());
    for (auto run = low_.rbegin(); run != low_.rend(); ++run) put(coder, *run, low, tokens);
    for (auto run = high_.rbegin(); run != high_.rend(); ++run) put(coder, *run, high, tokens);
    coder.finish();
    out.stream.assign(coder.data(), coder.data() + coder.bytes());
    return out;
  }

  // False if the stream or the number of escapes is not that of such rows.
  bool decode(const u8* stream, std::size_t bytes, std::size_t escapes, std::size_t tokens,
              Symbols& out) const {
    rans::Decoder coder(stream, bytes);
    out.high.resize(rows() * tokens);
    out.low.resize(low_rows() * tokens);
    for (const Run& run : high_) {
      if (!coder.run(run.decode, out.high.data() + run.begin * tokens, run.size() * tokens)) {
        return false;
      }
    }
    for (const Run& run : low_) {
      if (!coder.run(run.decode, out.low.data() + run.begin * tokens, run.size() * tokens)) {
        return false;
      }
    }
    out.first_escape.resize(rows() + 1);
    std::size_t seen = 0;
    for (std::size_t at = 0; at < rows(); ++at) {
      out.first_escape[at] = static_cast<u32>(seen);
      const u8* const row = out.high.data() + at * tokens;
      seen += static_cast<std::size_t>(std::count(row, row + tokens, 0));
    }
    out.first_escape[rows()] = static_cast<u32>(seen);
    return coder.ended() && seen == escapes;
  }

  // One row's values; returns whether all are zero, and then writes nothing.
  template <typename T>
  bool values(const Symbols& from, const u8* escapes, std::size_t row, std::size_t tokens,
              T* out) const {
    const std::size_t at = high_at_[row];
    const u8* const high = from.high.data() + at * tokens;
    const unsigned shift = shift_[row];
    if (shift == 0) {
      bool zero = true;
      for (std::size_t t = 0; t < tokens; ++t) zero &= high[t] == kMiddle;
      if (zero) return true;
      for (std::size_t t = 0; t < tokens; ++t) out[t] = static_cast<T>(i32{high[t]} - 128);
    } else {
      const u8* const low = from.low.data() + low_at_[row] * tokens;
      const i32 scale = i32{1} << shift;
      for (std::size_t t = 0; t < tokens; ++t) {
        out[t] = static_cast<T>((i32{high[t]} - 128) * scale + i32{low[t]});
      }
    }
    u32 next = from.first_escape[at];
    if (next == from.first_escape[at + 1]) return false;
    for (std::size_t t = 0; t < tokens; ++t) {
      if (high[t] != 0) continue;
      i32 value;
      std::memcpy(&value, escapes + 4 * std::size_t{next++}, 4);
      out[t] = static_cast<T>(value);
    }
    return false;
  }

 private:
  struct Run {
    std::vector<u32> members;
    std::size_t begin;
    rans::Frequencies frequencies;
    rans::EncodeTable encode;
    rans::DecodeTable decode;

    explicit Run(const rans::Frequencies& f) : frequencies(f), encode(f) {
      if (!decode.build(f)) throw std::invalid_argument("frequencies of a class do not add up");
    }
    std::size_t size() const { return members.size(); }
  };

  static rans::Frequencies read(const u8* frequencies, std::size_t cls) {
    rans::Frequencies out;
    std::memcpy(out.of, frequencies + cls * sizeof(out.of), sizeof(out.of));
    return out;
  }

  static void check(const rans::Frequencies& f) {
    u32 total = 0, most = 0;
    for (const u16 part : f.of) {
      total += part;
      most = std::max<u32>(most, part);
    }
    if (total != rans::kScale || most == rans::kScale || f.of[0] == 0) {
      throw std::invalid_argument("frequencies of a class do not add up");
    }
  }

  static rans::Frequencies uniform(u32 bits) {
    rans::Frequencies out;
    std::fill(out.of, out.of + (1u << bits), static_cast<u16>(rans::kScale >> bits));
    return out;
  }

  static void add(std::vector<Run>& runs, std::vector<u32>& members, const rans::Frequencies& f,
                  std::vector<u32>& at) {
    const std::size_t begin = runs.empty() ? 0 : runs.back().begin + runs.back().size();
    Run& run = runs.emplace_back(f);
    run.begin = begin;
    run.members = std::move(members);
    for (std::size_t i = 0; i < run.size(); ++i) at[run.members[i]] = static_cast<u32>(begin + i);
  }

  static void put(rans::Encoder& coder, const Run& run, const std::vector<u8>& symbols,
                  std::size_t tokens) {
    coder.run(run.encode, symbols.data() + run.begin * tokens, run.size() * tokens);
  }

  std::size_t low_rows() const { return low_.empty() ? 0 : low_.back().begin + low_.back().size(); }

  void split(const Run& run, const i32* values, std::size_t row, std::size_t tokens, u8* high,
             u8* low, std::vector<i32>& escapes) const {
    const unsigned shift = shift_[row];
    for (std::size_t t = 0; t < tokens; ++t) {
      // >> of a negative value rounds down; what lies beyond wraps to what is no symbol.
      const u32 symbol = static_cast<u32>(values[t] >> shift) + kMiddle;
      const bool said = symbol - 1 < 255 && run.frequencies.of[symbol] != 0;
      high[t] = said ? static_cast<u8>(symbol) : 0;
      if (low != nullptr) low[t] = said ? static_cast<u8>(values[t] & ((1 << shift) - 1)) : 0;
      if (!said) escapes.push_back(values[t]);
    }
  }

  std::vector<u8> shift_;
  std::vector<u32> high_at_, low_at_;
  std::vector<Run> high_, low_;
};

}  // namespace kvist::cachegen
