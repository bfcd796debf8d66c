// Python binding of the value policy; `kvist/policy/value_twin.py` is its specification.
#include <nanobind/nanobind.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "value_order.hpp"
#include "value_walk.hpp"

namespace nb = nanobind;

namespace {

using kvist::value::Ages;
using kvist::value::Callbacks;
using kvist::value::Counts;
using kvist::value::Order;
using kvist::value::Walk;

PyObject* demand_key(nb::handle key) {
  if (!PyBytes_CheckExact(key.ptr())) throw nb::type_error("a key is bytes");
  return key.ptr();
}

PyObject* optional_key(nb::handle key) { return key.is_none() ? nullptr : demand_key(key); }

double number_of(const nb::object& number) {
  if (!number.is_valid()) throw nb::python_error();
  const double value = PyFloat_AsDouble(number.ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return value;
}

nb::bytes bytes_of(const std::vector<double>& values) {
  return nb::bytes(values.data(), values.size() * sizeof(double));
}

// The order and the Python callables that it asks.
class ValueOrder {
 public:
  ValueOrder(nb::object clock, nb::object weigh, nb::object revise, std::size_t ghost_blocks,
             double first_age_s, double age_scale, std::vector<double> age_ends_s)
      : clock_(std::move(clock)), weigh_(std::move(weigh)), revise_(std::move(revise)),
        order_(callbacks(), ghost_blocks, ages_of(first_age_s, age_scale, std::move(age_ends_s))) {}
  ValueOrder(const ValueOrder&) = delete;
  ValueOrder& operator=(const ValueOrder&) = delete;

  Order& order() { return order_; }

  int traverse(visitproc visit, void* arg) {
    for (const nb::object* each : {&clock_, &weigh_, &revise_}) Py_VISIT(each->ptr());
    return 0;
  }

  // Only the garbage collector: nobody calls the order after it.
  void clear() {
    for (nb::object* each : {&clock_, &weigh_, &revise_}) each->reset();
  }

 private:
  static Ages ages_of(double first_s, double scale, std::vector<double> ends_s) {
    if (ends_s.size() != kvist::value::kAges) throw nb::value_error("not the buckets of ages");
    return {first_s, scale, std::move(ends_s)};
  }

  Callbacks callbacks() {
    Callbacks python;
    python.clock = [this] { return number_of(nb::steal(PyObject_CallNoArgs(clock_.ptr()))); };
    if (!weigh_.is_none()) {
      python.weigh = [this](PyObject* key) { return nb::cast<int>(weigh_(nb::handle(key))); };
    }
    python.revise = [this](const Counts& counts) {
      nb::list known;
      for (const auto cls : counts.known) known.append(cls);
      const nb::object values = revise_(bytes_of(counts.ended), bytes_of(counts.waiting), known);
      const kvist::View view(values);
      std::vector<double> out(counts.ended.size());
      if (view.bytes() != out.size() * sizeof(double)) throw nb::value_error("values of odd shape");
      std::memcpy(out.data(), view.data(), view.bytes());
      return out;
    };
    return python;
  }

  nb::object clock_, weigh_, revise_;
  Order order_;
};

// A walk that keeps its order alive.
struct Victims {
  explicit Victims(nb::object policy)
      : owner(std::move(policy)), walk(nb::cast<ValueOrder&>(owner).order()) {}
  nb::object owner;
  Walk walk;
};

nb::object next_victim(Victims& victims) {
  PyObject* const key = victims.walk.next();
  if (key == nullptr) throw nb::stop_iteration();
  return nb::borrow(key);
}

void begin(ValueOrder& policy, nb::handle hints) {
  using namespace kvist::value;
  const auto finish = nb::cast<u32>(hints.attr("finish"));
  if (finish >= kFinishes) throw nb::value_error("no such finish");
  u32 size = 0;
  if (const nb::object tokens = hints.attr("output_tokens"); !tokens.is_none()) {
    size = nb::cast<std::int64_t>(tokens) < kLongOutputTokens ? 1 : 2;
  }
  const nb::object partial = hints.attr("partial");
  policy.order().begin((finish * kOutputClasses + size) * kUseClasses, optional_key(partial));
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<ValueOrder>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<ValueOrder>(self)->clear();
  return 0;
}

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {0, nullptr}};

}  // namespace

void bind_value(nb::module_& m) {
  nb::class_<Victims>(m, "Victims")
      .def("__iter__", [](nb::handle self) { return self; })
      .def("__next__", &next_victim)
      .def("close", [](Victims& victims) { victims.walk.close(); });
  nb::class_<ValueOrder>(m, "ValueOrder", nb::type_slots(slots))
      .def(nb::init<nb::object, nb::object, nb::object, std::size_t, double, double,
                    std::vector<double>>(),
           nb::arg("clock"), nb::arg("weigh").none(), nb::arg("revise"), nb::arg("ghost_blocks"),
           nb::arg("first_age_s"), nb::arg("age_scale"), nb::arg("age_ends_s"))
      .def("__len__", [](ValueOrder& p) { return p.order().size(); })
      .def("begin", &begin, nb::arg("hints"))
      .def("insert",
           [](ValueOrder& p, nb::handle key, nb::handle parent) {
             p.order().insert(demand_key(key), optional_key(parent));
           },
           nb::arg("key"), nb::arg("parent").none())
      .def("touch", [](ValueOrder& p, nb::handle key) { p.order().touch(demand_key(key)); },
           nb::arg("key"))
      .def("remove", [](ValueOrder& p, nb::handle key) { p.order().remove(demand_key(key)); },
           nb::arg("key"))
      .def("prefers",
           [](ValueOrder& p, nb::handle key) { return p.order().prefers(demand_key(key)); },
           nb::arg("key"))
      .def("victims", [](nb::object self) { return std::make_unique<Victims>(std::move(self)); })
      .def_prop_ro("remembered_blocks", [](ValueOrder& p) { return p.order().remembered(); })
      .def_prop_ro("shadow_turns", [](ValueOrder& p) { return p.order().turns(); });
}
