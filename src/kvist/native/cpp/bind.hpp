// What the binding files share: a Python buffer held while C++ uses it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

namespace kvist {

// A contiguous view of a Python buffer, held while this lives.
class View {
 public:
  explicit View(nanobind::handle object, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nanobind::python_error();
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  ~View() { PyBuffer_Release(&view_); }

  std::uint8_t* data() const { return static_cast<std::uint8_t*>(view_.buf); }
  std::size_t bytes() const { return static_cast<std::size_t>(view_.len); }
  bool readonly() const { return view_.readonly != 0; }

 private:
  Py_buffer view_;
};

}  // namespace kvist

void bind_answers(nanobind::module_& m);
void bind_table(nanobind::module_& m);
void bind_io(nanobind::module_& m);
void bind_owners(nanobind::module_& m);
void bind_spans(nanobind::module_& m);
void bind_value(nanobind::module_& m);
void bind_planes(nanobind::module_& m);
void bind_cachegen(nanobind::module_& m);
void bind_quantise(nanobind::module_& m);
