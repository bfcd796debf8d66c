// Python binding of `receive.hpp`; `kvist/native/receive_twin.py` is its specification.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cerrno>
#include <tuple>

#include "bind.hpp"
#include "receive.hpp"

namespace nb = nanobind;

namespace {

constexpr double kMostSeconds = 1e6;

std::tuple<std::size_t, std::uint64_t> receive_checksum(int fd, nb::handle out, double left_s) {
  const kvist::View view(out, PyBUF_WRITABLE);
  const std::chrono::duration<double> left(std::clamp(left_s, 0.0, kMostSeconds));
  try {
    nb::gil_scoped_release unlocked;
    const auto until =
        kvist::net::Clock::now() + std::chrono::duration_cast<kvist::net::Clock::duration>(left);
    const auto got = kvist::net::receive(fd, view.data(), view.bytes(), until);
    return {got.bytes, got.checksum};
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

}  // namespace

void bind_receive(nb::module_& m) {
  m.def("receive_checksum", &receive_checksum, nb::arg("fd"), nb::arg("out"), nb::arg("left_s"));
}
