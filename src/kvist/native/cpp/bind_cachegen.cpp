// Python bindings of cachegen; `kvist/native/cachegen_twin.py` is the specification.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <string>
#include <tuple>
#include <vector>

#include "bind.hpp"
#include "cachegen.hpp"

namespace nb = nanobind;

namespace {

using kvist::View;
using namespace kvist::cachegen;

constexpr const char* kNotRows = "the stream is not one of such rows";

RowCoder coder_of(nb::handle frequencies, nb::handle row_class, nb::handle row_shift) {
  const View f(frequencies), classes(row_class), shifts(row_shift);
  if (f.bytes() % sizeof(kvist::rans::Frequencies) != 0 || classes.bytes() != shifts.bytes()) {
    throw nb::value_error("classes and shifts are of different rows");
  }
  return RowCoder(f.data(), f.bytes() / sizeof(kvist::rans::Frequencies), classes.data(),
                  shifts.data(), classes.bytes());
}

std::vector<float> floats_of(nb::handle object, std::size_t count) {
  const View view(object);
  if (view.bytes() != 4 * count) throw nb::value_error("not as many numbers as it takes");
  std::vector<float> out(count);
  std::memcpy(out.data(), view.data(), view.bytes());
  return out;
}

Dtype dtype_of(const std::string& name) {
  if (name == "bfloat16") return Dtype::bfloat16;
  if (name == "float16") return Dtype::float16;
  if (name == "float32") return Dtype::float32;
  throw nb::value_error("no such plan");
}

template <typename Way>
Way way(const std::vector<Way>& all, std::size_t variant) {
  return variant < all.size() ? all[variant] : all.back();
}

template <typename T>
nb::bytes bytes_of(const std::vector<T>& values) {
  return nb::bytes(values.data(), values.size() * sizeof(T));
}

std::tuple<nb::bytes, nb::bytes> encode_rows(const RowCoder& coder, nb::handle values) {
  const View view(values);
  const std::size_t tokens = view.bytes() / 4 / coder.rows();
  if (tokens == 0 || view.bytes() != tokens * coder.rows() * 4) {
    throw nb::value_error("values are not of so many rows");
  }
  Coded coded;
  {
    nb::gil_scoped_release unlocked;
    std::vector<i32> aligned(tokens * coder.rows());
    std::memcpy(aligned.data(), view.data(), view.bytes());
    Symbols scratch;
    coded = coder.encode(aligned.data(), tokens, scratch);
  }
  return {bytes_of(coded.stream), bytes_of(coded.escapes)};
}

nb::bytes decode_rows(const RowCoder& coder, nb::handle stream, nb::handle escapes,
                      std::size_t tokens) {
  const View from(stream), given(escapes);
  // A symbol takes a 4096th of a bit at least, so a stream cannot make a block of any size.
  std::vector<i32> out(coder.rows() * tokens);
  bool good = given.bytes() % 4 == 0;
  {
    nb::gil_scoped_release unlocked;
    Symbols symbols;
    good = good && coder.decode(from.data(), from.bytes(), given.bytes() / 4, tokens, symbols);
    for (std::size_t row = 0; good && row < coder.rows(); ++row) {
      coder.values(symbols, given.data(), row, tokens, out.data() + row * tokens);
    }
  }
  if (!good) throw nb::value_error(kNotRows);
  return bytes_of(out);
}

class BoundPlan {
 public:
  BoundPlan(nb::handle frequencies, nb::handle row_class, nb::handle row_shift, std::size_t dim,
            const std::string& dtype, nb::handle analysis, nb::handle basis, nb::handle scale,
            nb::handle mean, nb::handle inverse_spread, nb::handle turned, std::size_t pairs,
            float limit)
      : plan_(make(coder_of(frequencies, row_class, row_shift), dim, dtype, analysis, basis, scale,
                   mean, inverse_spread, turned, pairs, limit)) {}

  std::tuple<nb::bytes, nb::bytes> encode_rows(nb::handle values) const {
    return ::encode_rows(plan_.coder(), values);
  }
  nb::bytes decode_rows(nb::handle stream, nb::handle escapes, std::size_t tokens) const {
    return ::decode_rows(plan_.coder(), stream, escapes, tokens);
  }

  std::tuple<nb::bytes, nb::bytes, nb::bytes> encode(nb::handle block, nb::handle cosine,
                                                     nb::handle sine, std::size_t variant) const {
    const View view(block);
    const std::size_t tokens = tokens_of(view.bytes());
    if (tokens == 0) throw nb::value_error("the block is not of so many regions");
    const auto cos = floats_of(cosine, tokens * plan_.shape().pairs);
    const auto sin = floats_of(sine, tokens * plan_.shape().pairs);
    Encoded out;
    {
      nb::gil_scoped_release unlocked;
      out = plan_.encode(view.data(), tokens, {cos.data(), sin.data()},
                         way(multiply_variants(), variant));
    }
    return {bytes_of(out.left_out), bytes_of(out.coded.stream), bytes_of(out.coded.escapes)};
  }

  void decode(nb::handle stream, nb::handle escapes, nb::handle left_out, nb::handle out,
              nb::handle cosine, nb::handle sine, std::size_t variant) const {
    const View from(stream), given(escapes), missing(left_out), to(out);
    if (to.readonly()) throw nb::buffer_error("out is read-only");
    const std::size_t tokens = tokens_of(to.bytes());
    std::vector<u32> kept;
    if (tokens == 0 || given.bytes() % 4 != 0 || !others(missing, tokens, kept)) {
      throw nb::value_error(kNotRows);
    }
    const auto cos = floats_of(cosine, tokens * plan_.shape().pairs);
    const auto sin = floats_of(sine, tokens * plan_.shape().pairs);
    bool good = false;
    {
      nb::gil_scoped_release unlocked;
      good = plan_.decode(from.data(), from.bytes(), given.data(), given.bytes() / 4, kept, tokens,
                          {cos.data(), sin.data()}, way(rebuild_variants(), variant), to.data());
    }
    if (!good) throw nb::value_error(kNotRows);
  }

 private:
  static Plan make(RowCoder coder, std::size_t dim, const std::string& dtype, nb::handle analysis,
                   nb::handle basis, nb::handle scale, nb::handle mean, nb::handle inverse,
                   nb::handle turned, std::size_t pairs, float limit) {
    if (dim == 0 || coder.rows() % dim != 0 || pairs > dim / 2) {
      throw nb::value_error("no such plan");
    }
    const std::size_t rows = coder.rows(), regions = rows / dim;
    const View turns(turned);
    if (turns.bytes() != regions) throw nb::value_error("turned is not of such regions");
    const Shape shape{regions, dim, pairs, dtype_of(dtype)};
    const View directions(basis);
    if (directions.bytes() != rows * dim) throw nb::value_error("the basis is of other regions");
    const auto forth = floats_of(analysis, rows * dim), back = floats_of(scale, rows);
    const auto middle = floats_of(mean, rows), spread = floats_of(inverse, rows);
    return Plan(std::move(coder), shape, forth.data(),
                reinterpret_cast<const std::int8_t*>(directions.data()), back.data(),
                middle.data(), spread.data(), turns.data(), limit);
  }

  // 0 if a block of so many bytes has no whole tokens.
  std::size_t tokens_of(std::size_t bytes) const {
    const std::size_t one = plan_.shape().regions * plan_.token_bytes();
    return bytes % one == 0 ? bytes / one : 0;
  }

  // The tokens that are not left out; false unless those rise and are there.
  static bool others(const View& left_out, std::size_t tokens, std::vector<u32>& kept) {
    if (left_out.bytes() % 4 != 0) return false;
    u32 next = 0;
    for (std::size_t at = 0; at < left_out.bytes(); at += 4) {
      u32 token;
      std::memcpy(&token, left_out.data() + at, 4);
      if (token >= tokens || (at != 0 && token < next)) return false;
      for (; next < token; ++next) kept.push_back(next);
      next = token + 1;
    }
    for (; next < tokens; ++next) kept.push_back(next);
    return true;
  }

  Plan plan_;
};

class BoundCoder {
 public:
  BoundCoder(nb::handle frequencies, nb::handle row_class, nb::handle row_shift)
      : coder_(coder_of(frequencies, row_class, row_shift)) {}
  std::tuple<nb::bytes, nb::bytes> encode_rows(nb::handle values) const {
    return ::encode_rows(coder_, values);
  }
  nb::bytes decode_rows(nb::handle stream, nb::handle escapes, std::size_t tokens) const {
    return ::decode_rows(coder_, stream, escapes, tokens);
  }

 private:
  RowCoder coder_;
};

}  // namespace

void bind_cachegen(nb::module_& m) {
  m.def("cachegen_variants", [] { return rebuild_variants().size(); });
  nb::class_<BoundCoder>(m, "RowCoder")
      .def(nb::init<nb::handle, nb::handle, nb::handle>(), nb::arg("frequencies"),
           nb::arg("row_class"), nb::arg("row_shift"))
      .def("encode_rows", &BoundCoder::encode_rows, nb::arg("values"))
      .def("decode_rows", &BoundCoder::decode_rows, nb::arg("stream"), nb::arg("escapes"),
           nb::arg("tokens"));
  const std::size_t best = 99;
  nb::class_<BoundPlan>(m, "CachegenPlan")
      .def(nb::init<nb::handle, nb::handle, nb::handle, std::size_t, const std::string&, nb::handle,
                    nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, std::size_t,
                    float>(),
           nb::arg("frequencies"), nb::arg("row_class"), nb::arg("row_shift"), nb::kw_only(),
           nb::arg("dim"), nb::arg("dtype"), nb::arg("analysis"), nb::arg("basis"),
           nb::arg("scale"), nb::arg("mean"), nb::arg("inverse_spread"), nb::arg("turned"), nb::arg("pairs"),
           nb::arg("limit"))
      .def("encode_rows", &BoundPlan::encode_rows, nb::arg("values"))
      .def("decode_rows", &BoundPlan::decode_rows, nb::arg("stream"), nb::arg("escapes"),
           nb::arg("tokens"))
      .def("encode", &BoundPlan::encode, nb::arg("block"), nb::arg("cosine"), nb::arg("sine"),
           nb::kw_only(), nb::arg("variant") = best)
      .def("decode", &BoundPlan::decode, nb::arg("stream"), nb::arg("escapes"),
           nb::arg("left_out"), nb::arg("out"), nb::arg("cosine"), nb::arg("sine"), nb::kw_only(),
           nb::arg("variant") = best);
}
