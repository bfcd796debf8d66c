// Python bindings of the lossless codec's body; `kvist/native/planes_twin.py` is the specification.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bind.hpp"
#include "planes.hpp"

namespace nb = nanobind;

namespace {

using kvist::View;
using kvist::planes::Shape;

Shape shape_of(std::size_t bytes, std::size_t groups, std::size_t width) {
  if (width != 1 && width != 2 && width != 4) throw nb::value_error("a value has 1, 2 or 4 bytes");
  if (groups == 0 || bytes == 0 || bytes % groups != 0 || bytes / groups % width != 0) {
    throw nb::value_error("the block is not of so many groups of values");
  }
  return {groups, bytes / groups / width, width};
}

nb::bytes encode_with(nb::handle block, std::size_t groups, std::size_t width,
                      kvist::rans::EncodeRounds rounds) {
  const View view(block);
  const Shape shape = shape_of(view.bytes(), groups, width);
  std::vector<std::uint8_t> body;
  {
    nb::gil_scoped_release unlocked;
    body = kvist::planes::encode(view.data(), shape, rounds);
  }
  return nb::bytes(body.data(), body.size());
}

nb::bytes encode_planes(nb::handle block, std::size_t groups, std::size_t width) {
  return encode_with(block, groups, width, kvist::rans::best_encode());
}

void decode_with(nb::handle body, nb::handle out, std::size_t groups, std::size_t width,
                 kvist::rans::Rounds rounds) {
  const View from(body), to(out);
  if (to.readonly()) throw nb::buffer_error("out is read-only");
  const Shape shape = shape_of(to.bytes(), groups, width);
  bool good = false;
  {
    nb::gil_scoped_release unlocked;
    good = kvist::planes::decode(from.data(), from.bytes(), to.data(), shape, rounds);
  }
  if (!good) throw nb::value_error("not the planes of such a block");
}

void decode_planes(nb::handle body, nb::handle out, std::size_t groups, std::size_t width) {
  decode_with(body, out, groups, width, kvist::rans::best_rounds());
}

// What each way that this machine has makes of a block; for parity tests.
std::vector<nb::bytes> encode_planes_variants(nb::handle block, std::size_t groups,
                                              std::size_t width) {
  std::vector<nb::bytes> out;
  for (const auto rounds : kvist::rans::encode_variants()) {
    out.push_back(encode_with(block, groups, width, rounds));
  }
  return out;
}

std::size_t planes_variants() { return kvist::rans::round_variants().size(); }

void decode_planes_variant(nb::handle body, nb::handle out, std::size_t groups, std::size_t width,
                           std::size_t variant) {
  decode_with(body, out, groups, width, kvist::rans::round_variants().at(variant));
}

}  // namespace

void bind_planes(nb::module_& m) {
  m.def("encode_planes", &encode_planes, nb::arg("block"), nb::arg("groups"), nb::arg("width"));
  m.def("decode_planes", &decode_planes, nb::arg("body"), nb::arg("out"), nb::arg("groups"),
        nb::arg("width"));
  m.def("encode_planes_variants", &encode_planes_variants, nb::arg("block"), nb::arg("groups"),
        nb::arg("width"));
  m.def("planes_variants", &planes_variants);
  m.def("decode_planes_variant", &decode_planes_variant, nb::arg("body"), nb::arg("out"),
        nb::arg("groups"), nb::arg("width"), nb::arg("variant"));
}
