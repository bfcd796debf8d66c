// Python binding of `answers.hpp`; `kvist/native/answers_twin.py` is its specification.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <vector>

#include "answers.hpp"
#include "bind.hpp"

namespace nb = nanobind;

namespace {

using namespace kvist::net;
using kvist::View;

constexpr double kMostSeconds = 1e6;

Clock::duration duration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::clamp(seconds, 0.0, kMostSeconds)));
}

// Calls without the GIL; what a socket says becomes an `OSError`, a broken rule a `ValueError`.
template <typename Call>
void unlocked(Call call) {
  try {
    nb::gil_scoped_release released;
    call();
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  } catch (const RuleError& error) {
    throw nb::value_error(error.what());
  }
}

// Answers, and the buffers that they come into, held while this lives.
class HeldAnswers {
 public:
  HeldAnswers(const nb::sequence& keys, const nb::sequence& outs)
      : answers_(slots(keys, outs)) {}
  HeldAnswers(const HeldAnswers&) = delete;
  HeldAnswers& operator=(const HeldAnswers&) = delete;

  std::size_t left() const { return answers_.left(); }

  nb::list take(int fd, double left_s, double each_s, double tell_s) {
    std::vector<Answer> found;
    unlocked([&] {
      answers_.take(fd, Clock::now() + duration(left_s), duration(each_s), duration(tell_s), found);
    });
    nb::list out;
    for (const Answer& answer : found) {
      nb::object at = nb::none();
      if (answer.at) at = nb::make_tuple(answer.at->incarnation, answer.at->number);
      out.append(nb::make_tuple(answer.index, static_cast<int>(answer.found), at));
    }
    return out;
  }

 private:
  std::vector<Slot> slots(const nb::sequence& keys, const nb::sequence& outs) {
    if (nb::len(keys) != nb::len(outs)) throw nb::value_error("as many keys as buffers");
    for (nb::handle out : outs) views_.emplace_back(out, PyBUF_WRITABLE);
    std::vector<Slot> found;
    found.reserve(views_.size());
    std::size_t i = 0;
    for (nb::handle key : keys) {
      const View bytes(key);
      if (bytes.bytes() != kKeyBytes) throw nb::value_error("a key has 32 bytes");
      Slot& slot = found.emplace_back(Slot{views_[i].data(), views_[i].bytes(), {}});
      std::memcpy(slot.key, bytes.data(), kKeyBytes);
      ++i;
    }
    return found;
  }

  std::deque<View> views_;
  Answers answers_;
};

}  // namespace

void bind_answers(nb::module_& m) {
  nb::class_<HeldAnswers>(m, "Answers")
      .def(nb::init<nb::sequence, nb::sequence>(), nb::arg("keys"), nb::arg("outs"))
      .def_prop_ro("left", &HeldAnswers::left)
      .def("take", &HeldAnswers::take, nb::arg("fd"), nb::arg("left_s"), nb::arg("each_s"),
           nb::arg("tell_s"));
}
