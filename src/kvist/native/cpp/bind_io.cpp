// Python binding of the I/O engines; `kvist/native/io_twin.py` is their specification.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "bind.hpp"
#include "io_engine.hpp"

namespace nb = nanobind;

namespace {

using kvist::io::Batch;
using kvist::io::Done;
using kvist::io::Engine;
using kvist::io::Op;

constexpr std::int64_t kMaxDepth = 1024;

[[noreturn]] void raise_os_error(const std::system_error& error) {
  errno = error.code().value();
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

// Operations with the Python buffers that they use; both live until the last one has ended.
class PyBatch {
 public:
  PyBatch(std::shared_ptr<Engine> engine, nb::handle ops) : engine_(std::move(engine)) {
    std::vector<Op> list;
    for (nb::handle item : nb::borrow<nb::sequence>(ops)) list.push_back(read_op(item));
    nb::gil_scoped_release unlocked;
    batch_ = engine_->submit(std::move(list));
  }
  PyBatch(const PyBatch&) = delete;
  PyBatch& operator=(const PyBatch&) = delete;
  ~PyBatch() { close(); }

  std::optional<std::tuple<std::size_t, std::int64_t>> next() {
    if (batch_ == nullptr) return std::nullopt;
    Done done{};
    bool any;
    try {
      nb::gil_scoped_release unlocked;
      any = batch_->next(done);
    } catch (const std::system_error& error) {
      raise_os_error(error);
    }
    if (!any) return std::nullopt;
    return std::make_tuple(done.index, done.result);
  }

  void close() {
    if (batch_ != nullptr) {
      nb::gil_scoped_release unlocked;
      batch_->drain();
      batch_.reset();
    }
    views_.clear();
    engine_.reset();
  }

 private:
  Op read_op(nb::handle item) {
    const auto parts = nb::cast<nb::tuple>(item);
    if (parts.size() != 4) throw nb::value_error("an operation is (write, fd, offset, buffers)");
    Op op{nb::cast<bool>(parts[0]), nb::cast<int>(parts[1]), nb::cast<std::int64_t>(parts[2]), {}};
    for (nb::handle buffer : nb::borrow<nb::sequence>(parts[3])) {
      const int flags = op.write ? PyBUF_SIMPLE : PyBUF_WRITABLE;
      views_.push_back(std::make_unique<kvist::View>(buffer, flags));
      op.buffers.push_back({views_.back()->data(), views_.back()->bytes()});
    }
    return op;
  }

  std::shared_ptr<Engine> engine_;
  std::vector<std::unique_ptr<kvist::View>> views_;
  std::unique_ptr<Batch> batch_;
};

class PyEngine {
 public:
  PyEngine(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
  ~PyEngine() { close(); }

  std::unique_ptr<PyBatch> submit(nb::handle ops) {
    if (engine_ == nullptr) throw nb::value_error("the engine was closed");
    try {
      return std::make_unique<PyBatch>(engine_, ops);
    } catch (const std::system_error& error) {
      raise_os_error(error);
    }
  }

  // Batches that are out keep the engine alive.
  void close() {
    nb::gil_scoped_release unlocked;
    engine_.reset();
  }

 private:
  std::shared_ptr<Engine> engine_;
};

template <typename Kind>
std::unique_ptr<PyEngine> open_engine(std::int64_t depth) {
  if (depth < 1 || depth > kMaxDepth) throw nb::value_error("depth is not from 1 to 1024");
  try {
    return std::make_unique<PyEngine>(std::make_shared<Kind>(static_cast<unsigned>(depth)));
  } catch (const std::system_error& error) {
    raise_os_error(error);
  }
}

}  // namespace

void bind_io(nb::module_& m) {
  nb::class_<PyBatch>(m, "IoBatch").def("next", &PyBatch::next).def("close", &PyBatch::close);
  nb::class_<PyEngine>(m, "IoEngine")
      .def("submit", &PyEngine::submit, nb::arg("ops"))
      .def("close", &PyEngine::close);
  m.def("open_uring", &open_engine<kvist::io::UringEngine>, nb::arg("depth"));
  m.def("open_pool", &open_engine<kvist::io::PoolEngine>, nb::arg("depth"));
}
