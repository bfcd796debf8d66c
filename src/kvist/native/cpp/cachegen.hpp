// Whole blocks by cachegen: `kvist/native/cachegen_twin.py` is the specification. A plan is
// immutable; any number of threads may use one.
#pragma once

#include "cachegen_rows.hpp"
#include "cachegen_turn.hpp"

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
  Plan(RowCoder coder, Shape shape, const float* analysis, const float* basis, const float* mean,
       const float* inverse_spread, const u8* turned, float limit)
      : coder_(std::move(coder)), shape_(shape),
        stride_((shape.dim + kWide - 1) / kWide * kWide),
        analysis_(padded(analysis)), basis_(padded(basis)),
        mean_(mean, mean + coder_.rows()), inverse_(inverse_spread, inverse_spread + coder_.rows()),
        turned_(turned, turned + shape.regions), limit_(limit) {}

  const RowCoder& coder() const { return coder_; }
  const Shape& shape() const { return shape_; }

  Encoded encode(const u8* block, std::size_t tokens, Angles angles, Multiply multiply) const {
    std::vector<float> parts(coder_.rows() * tokens), strange(tokens, 0.0f);
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
    std::vector<i32> q(coder_.rows() * kept.size());
    for (std::size_t row = 0; row < coder_.rows(); ++row) {
      const float* const part = parts.data() + row * tokens;
      i32* const to = q.data() + row * kept.size();
      for (std::size_t k = 0; k < kept.size(); ++k) {
        to[k] = static_cast<i32>(std::nearbyint(part[kept[k]]));
      }
    }
    out.coded = coder_.encode(q.data(), kept.size());
    return out;
  }

  // `kept` are the tokens that were coded, of `tokens`. False: not what `encode` gives.
  bool decode(const u8* stream, std::size_t stream_bytes, const u8* escapes,
              std::size_t escape_count, const std::vector<u32>& kept, std::size_t tokens,
              Angles angles, Multiply multiply, u8* out) const {
    Symbols symbols;
    const std::size_t count = kept.size();
    if (!coder_.decode(stream, stream_bytes, escape_count, count, symbols)) return false;
    std::vector<float> values(shape_.dim * count), x(count * stride_);
    std::vector<u32> rows(shape_.dim);
    for (std::size_t region = 0; region < shape_.regions; ++region) {
      std::size_t used = 0;
      for (std::size_t d = 0; d < shape_.dim; ++d) {
        rows[used] = static_cast<u32>(d);
        const bool zero = coder_.values(symbols, escapes, region * shape_.dim + d, count,
                                        values.data() + used * count);
        used += zero ? 0 : 1;
      }
      multiply({basis_.data() + region * shape_.dim * stride_, stride_, rows.data(), used,
                values.data(), count, x.data()});
      finish(region, x.data(), kept, angles, out + region * tokens * token_bytes());
    }
    return true;
  }

  std::size_t token_bytes() const { return shape_.dim * width_of(shape_.dtype); }

 private:
  static constexpr float kMostValue = 1 << 24;  // up to here float32 holds every integer

  std::vector<float> padded(const float* matrices) const {
    std::vector<float> out(shape_.regions * shape_.dim * stride_);
    for (std::size_t row = 0; row < shape_.regions * shape_.dim; ++row) {
      std::copy(matrices + row * shape_.dim, matrices + (row + 1) * shape_.dim,
                out.data() + row * stride_);
    }
    return out;
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
      for (std::size_t c = 0; c < dim; ++c) across[c * tokens + t] = x[c] - mean_[region * dim + c];
    }
    std::vector<u32> rows(dim);
    for (std::size_t c = 0; c < dim; ++c) rows[c] = static_cast<u32>(c);
    multiply({analysis_.data() + region * dim * stride_, stride_, rows.data(), dim, across.data(),
              tokens, y.data()});
    for (std::size_t d = 0; d < dim; ++d) {
      float* const part = parts + (region * dim + d) * tokens;
      for (std::size_t t = 0; t < tokens; ++t) part[t] = y[t * stride_ + d];
    }
  }

  void finish(std::size_t region, float* x, const std::vector<u32>& kept, Angles angles,
              u8* out) const {
    const float* const mean = mean_.data() + region * shape_.dim;
    for (std::size_t k = 0; k < kept.size(); ++k, x += stride_) {
      for (std::size_t c = 0; c < shape_.dim; ++c) x[c] += mean[c];
      if (turned_[region] != 0) {
        const std::size_t at = kept[k] * shape_.pairs;
        turn(x, angles.cosine + at, angles.sine + at, shape_.pairs, false);
      }
      store(x, shape_.dim, shape_.dtype, out + kept[k] * token_bytes());
    }
  }

  RowCoder coder_;
  Shape shape_;
  std::size_t stride_;
  std::vector<float> analysis_, basis_, mean_, inverse_;
  std::vector<u8> turned_;
  float limit_;
};

}  // namespace kvist::cachegen
