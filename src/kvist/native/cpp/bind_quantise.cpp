// Python bindings of the quantising codecs; `kvist/native/quantise_twin.py` is the specification.
#include <nanobind/nanobind.h>

#include <vector>

#include "bind.hpp"
#include "quantise_heads.hpp"

namespace nb = nanobind;

namespace {

using kvist::View;
using kvist::quantise::Number;
using kvist::quantise::Scheme;
using kvist::quantise::Shape;

Shape read_shape(nb::handle shape) {
  const auto size = [&](const char* name) {
    const auto value = nb::cast<std::int64_t>(shape.attr(name));
    if (value < 1 || value > 1 << 24) throw nb::value_error("a size is not from 1 to 2**24");
    return static_cast<std::size_t>(value);
  };
  return {size("layers"), size("kinds"), size("heads"), size("tokens"), size("dim"), size("group")};
}

// Calls `act` with the two as constants.
template <typename Act>
auto with_types(nb::handle shape, const Act& act) {
  const auto number = static_cast<Number>(nb::cast<int>(shape.attr("number")));
  const auto scheme = static_cast<Scheme>(nb::cast<int>(shape.attr("scheme")));
  const auto with_number = [&](auto n) {
    constexpr Number N = decltype(n)::value;
    switch (scheme) {
      case Scheme::kInt8:
        return act.template operator()<N, Scheme::kInt8>();
      case Scheme::kFp8:
        return act.template operator()<N, Scheme::kFp8>();
      case Scheme::kInt4:
        return act.template operator()<N, Scheme::kInt4>();
    }
    throw nb::value_error("no such scheme");
  };
  switch (number) {
    case Number::kBf16:
      return with_number(std::integral_constant<Number, Number::kBf16>());
    case Number::kF16:
      return with_number(std::integral_constant<Number, Number::kF16>());
    case Number::kF32:
      return with_number(std::integral_constant<Number, Number::kF32>());
  }
  throw nb::value_error("no such numbers");
}

void check_size(const Shape& shape, std::size_t width, std::size_t bytes) {
  if (bytes != shape.planes() * shape.tokens * shape.dim * width) {
    throw nb::value_error("the block is not of this shape");
  }
}

struct Encode {
  const View& block;
  const Shape& shape;
  bool portable;

  template <Number N, Scheme S>
  std::vector<std::uint8_t> operator()() const {
    check_size(shape, kvist::quantise::width_of(N), block.bytes());
    nb::gil_scoped_release unlocked;
    return kvist::quantise::encode<N, S>(block.data(), shape, portable);
  }
};

struct Decode {
  const View &body, &out;
  const Shape& shape;
  bool portable;

  template <Number N, Scheme S>
  bool operator()() const {
    check_size(shape, kvist::quantise::width_of(N), out.bytes());
    nb::gil_scoped_release unlocked;
    return kvist::quantise::decode<N, S>(body.data(), body.bytes(), out.data(), shape, portable);
  }
};

nb::bytes encode_with(nb::handle block, nb::handle shape, bool portable) {
  const View view(block);
  const Shape sizes = read_shape(shape);
  const auto body = with_types(shape, Encode{view, sizes, portable});
  return nb::bytes(body.data(), body.size());
}

void decode_with(nb::handle body, nb::handle out, nb::handle shape, bool portable) {
  const View from(body), to(out);
  if (to.readonly()) throw nb::buffer_error("out is read-only");
  const Shape sizes = read_shape(shape);
  if (!with_types(shape, Decode{from, to, sizes, portable})) {
    throw nb::value_error("not the codes of such a block");
  }
}

nb::bytes encode_quantised(nb::handle block, nb::handle shape) {
  return encode_with(block, shape, false);
}

void decode_quantised(nb::handle body, nb::handle out, nb::handle shape) {
  decode_with(body, out, shape, false);
}

// Without wider registers; for parity tests.
nb::bytes encode_quantised_portable(nb::handle block, nb::handle shape) {
  return encode_with(block, shape, true);
}

void decode_quantised_portable(nb::handle body, nb::handle out, nb::handle shape) {
  decode_with(body, out, shape, true);
}

}  // namespace

void bind_quantise(nb::module_& m) {
  m.def("encode_quantised", &encode_quantised, nb::arg("block"), nb::arg("shape"));
  m.def("decode_quantised", &decode_quantised, nb::arg("body"), nb::arg("out"), nb::arg("shape"));
  m.def("encode_quantised_portable", &encode_quantised_portable, nb::arg("block"),
        nb::arg("shape"));
  m.def("decode_quantised_portable", &decode_quantised_portable, nb::arg("body"), nb::arg("out"),
        nb::arg("shape"));
}
