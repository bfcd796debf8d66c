// Whole blocks by cachegen: `kvist/native/cachegen_twin.py` is the specification. A plan is
// immutable; any number of threads may use one.
#pragma once

#include <cmath>

#include "cachegen_rows.hpp"
#include "cachegen_products.hpp"

namespace kvist::cachegen {

struct Shape {
  std::size_t regions, dim, pairs;
  Dtype dtype;
};

struct Angles {
  const float* cosine;
  const float* sine;
};

struct Encoded {
  std::vector<u32> left_out;
  Coded coded;
};

class Plan {
 public:
  // Arrays as the twin describes them: their sizes were checked.
  Plan(RowCoder coder, Shape shape, const float* analysis, const std::int8_t* basis,
       const float* scale, const float* mean, const float* inverse_spread, const u8* turned,
       float limit)
      : coder_(std::move(coder)), shape_(shape),
        stride_((shape.dim + kWide - 1) / kWide * kWide),
        analysis_(padded(analysis, shape.regions * shape.dim)), basis_(paired(basis)),
        scale_(padded(scale, shape.regions)), mean_(padded(mean, shape.regions)), inverse_(inverse_spread, inverse_spread + coder_.rows()),
        turned_(turned, turned + shape.regions), limit_(limit) {}

  const RowCoder& coder() const { return coder_; }
  const Shape& shape() const { return shape_; }

  Encoded encode(const u8* block, std::size_t tokens, Angles angles, Multiply multiply) const {
    static thread_local EncodeScratch scratch;
    std::vector<float>& parts = scratch.parts;
    parts.resize(coder_.rows() * tokens);
    std::vector<float> strange(tokens, 0.0f);
    std::vector<u8> fits(tokens, 1);
    for (std::size_t region = 0; region < shape_.regions; ++region) {
      analyse(block, region, tokens, angles, multiply, parts.data());
      for (std::size_t row = region * shape_.dim; row < (region + 1) * shape_.dim; ++row) {
        const float* const part = parts.data() + row * tokens;
        for (std::size_t t = 0; t < tokens; ++t) {
          const float scaled = part[t] * inverse_[row];
          strange[t] += scaled * scaled;
          fits[t] &= std::fabs(part[t]) < kMostValue;
        }
      }
    }
    Encoded out;
    std::vector<u32> kept;
    const float most = limit_ * static_cast<float>(coder_.rows());
    for (std::size_t t = 0; t < tokens; ++t) {
      (fits[t] && strange[t] <= most ? kept : out.left_out).push_back(static_cast<u32>(t));
    }
    if (kept.empty()) return out;
    // Whole numbers take the place of what they are made from: never ahead of it.
    auto* const q = reinterpret_cast<i32*>(parts.data());
    for (std::size_t row = 0; row < coder_.rows(); ++row) {
      for (std::size_t k = 0; k < kept.size(); ++k) {
        const i32 whole = nearest(parts[row * tokens + kept[k]]);
        std::memcpy(q + row * kept.size() + k, &whole, sizeof(whole));
      }
    }
    out.coded = coder_.encode(q, kept.size(), scratch.symbols);
    scratch.release();
    return out;
  }

  // `kept` are the tokens that were coded, of `tokens`. False: not what `encode` gives.
  bool decode(const u8* stream, std::size_t stream_bytes, const u8* escapes,
              std::size_t escape_count, const std::vector<u32>& kept, std::size_t tokens,
              Angles angles, Rebuild rebuild, u8* out) const {
    static thread_local Scratch scratch;
    const std::size_t count = kept.size();
    if (!coder_.decode(stream, stream_bytes, escape_count, count, scratch.symbols)) return false;
    scratch.size((shape_.dim + 1) / 2, count, stride_);
    for (std::size_t region = 0; region < shape_.regions; ++region) {
      Region r = gather(region, escapes, count, scratch);
      r.kept = kept.data();
      r.turned = turned_[region] != 0 ? shape_.pairs : 0;
      r.cosine = angles.cosine;
      r.sine = angles.sine;
      r.out = out + region * tokens * token_bytes();
      (r.wide ? rebuild_portable : rebuild)(r, scratch.sums.data(), scratch.x.data());
    }
    if (scratch.symbols.high.capacity() > kKeptBytes) scratch = Scratch{};
    return true;
  }

  std::size_t token_bytes() const { return shape_.dim * width_of(shape_.dtype); }

 private:
  static constexpr float kMostValue = 1 << 24;  // up to here float32 holds every integer

  // A thread keeps its scratch: new memory for every block costs more than coding it. What is very
  // large is given back.
  static constexpr std::size_t kKeptBytes = std::size_t{64} << 20;

  struct EncodeScratch {
    std::vector<float> parts;
    Symbols symbols;

    void release() {
      if (parts.capacity() * sizeof(float) > kKeptBytes) *this = EncodeScratch{};
    }
  };

  struct Scratch {
    Symbols symbols;
    std::vector<i32> values, sums;
    std::vector<u32> packed, pairs;
    std::vector<float> x;

    void size(std::size_t most_pairs, std::size_t tokens, std::size_t stride) {
      values.resize(most_pairs * 2 * tokens);
      packed.resize(most_pairs * tokens);
      pairs.resize(most_pairs);
      sums.resize(8 * stride);
      x.resize(stride);
    }
  };

  std::vector<float> padded(const float* matrix, std::size_t rows) const {
    std::vector<float> out(rows * stride_);
    for (std::size_t row = 0; row < rows; ++row) {
      std::copy(matrix + row * shape_.dim, matrix + (row + 1) * shape_.dim,
                out.data() + row * stride_);
    }
    return out;
  }

  // `[region][direction][channel]` → `[region][pair of directions][channel][2]`.
  std::vector<std::int16_t> paired(const std::int8_t* basis) const {
    const std::size_t dim = shape_.dim, pairs = (dim + 1) / 2;
    std::vector<std::int16_t> out(shape_.regions * pairs * stride_ * 2);
    for (std::size_t region = 0; region < shape_.regions; ++region) {
      for (std::size_t d = 0; d < dim; ++d) {
        for (std::size_t c = 0; c < dim; ++c) {
          out[((region * pairs + d / 2) * stride_ + c) * 2 + d % 2] =
              basis[(region * dim + d) * dim + c];
        }
      }
    }
    return out;
  }

  // The rows of a region in pairs, but for pairs that are zero everywhere.
  Region gather(std::size_t region, const u8* escapes, std::size_t tokens, Scratch& s) const {
    const std::size_t dim = shape_.dim, pairs = (dim + 1) / 2;
    bool wide = false;
    std::size_t used = 0;
    for (std::size_t pair = 0; pair < pairs; ++pair) {
      i32* const a = s.values.data() + used * 2 * tokens;
      i32* const b = a + tokens;
      const std::size_t row = region * dim + pair * 2;
      const bool no_a = coder_.values(s.symbols, escapes, row, tokens, a);
      const bool no_b = pair * 2 + 1 == dim || coder_.values(s.symbols, escapes, row + 1, tokens, b);
      if (no_a && no_b) continue;
      if (no_a) std::fill(a, a + tokens, 0);
      if (no_b) std::fill(b, b + tokens, 0);
      u32* const packed = s.packed.data() + used * tokens;
      u32 beyond = 0;
      for (std::size_t t = 0; t < tokens; ++t) {
        packed[t] = (static_cast<u32>(a[t]) & 0xFFFFu) | static_cast<u32>(b[t]) << 16;
        beyond |= (static_cast<u32>(a[t]) + 0x8000u) | (static_cast<u32>(b[t]) + 0x8000u);
      }
      wide |= beyond >> 16 != 0;
      s.pairs[used++] = static_cast<u32>(pair);
    }
    Region r{};
    r.basis = basis_.data() + region * pairs * stride_ * 2;
    r.scale = scale_.data() + region * stride_;
    r.mean = mean_.data() + region * stride_;
    r.stride = stride_;
    r.dim = dim;
    r.pairs = s.pairs.data();
    r.values = s.values.data();
    r.packed = s.packed.data();
    r.used = used;
    r.tokens = tokens;
    r.wide = wide;
    r.dtype = shape_.dtype;
    return r;
  }

  // The rows of a region before rounding: into `parts`, `[rows][tokens]`.
  void analyse(const u8* block, std::size_t region, std::size_t tokens, Angles angles,
               Multiply multiply, float* parts) const {
    const std::size_t dim = shape_.dim;
    std::vector<float> x(dim), across(dim * tokens), y(tokens * stride_);
    for (std::size_t t = 0; t < tokens; ++t) {
      load(block + (region * tokens + t) * token_bytes(), dim, shape_.dtype, x.data());
      if (turned_[region] != 0) {
        turn(x.data(), angles.cosine + t * shape_.pairs, angles.sine + t * shape_.pairs,
             shape_.pairs, true);
      }
      for (std::size_t c = 0; c < dim; ++c) across[c * tokens + t] = x[c] - mean_[region * stride_ + c];
    }
    multiply({analysis_.data() + region * dim * stride_, stride_, across.data(), dim, tokens,
              y.data()});
    for (std::size_t d = 0; d < dim; ++d) {
      float* const part = parts + (region * dim + d) * tokens;
      for (std::size_t t = 0; t < tokens; ++t) part[t] = y[t * stride_ + d];
    }
  }

  RowCoder coder_;
  Shape shape_;
  std::size_t stride_;
  std::vector<float> analysis_;
  std::vector<std::int16_t> basis_;
  std::vector<float> scale_, mean_, inverse_;
  std::vector<u8> turned_;
  float limit_;
};

}  // namespace kvist::cachegen
