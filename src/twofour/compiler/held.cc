// Whether a model is still what it was when a graph was captured of it: one look at every mapping, by identity, before each
// call. `held.py` says what is looked at, and finds the name of what changed.
//
// A call's weights have emptied the caches, so that a look waits for memory, not for instructions: what will be touched is
// fetched first, all at once.
#include <vector>

#include "native/binding.h"

namespace twofour {
namespace {

enum Seen : int { kTraining = 1, kHooks = 2, kChanged = 4 };

PyObject* name_of(const char* text) { return PyUnicode_InternFromString(text); }  // kept for the process

class HeldState {
 public:
  // `states`: what modules hold as attributes, `training` among it. `hooks`: mappings that are empty where no hook is set.
  // `places`: mappings whose values, in their order, are `values`. `tensors`: those that count writes.
  HeldState(const nb::list& states, const nb::list& hooks, const nb::list& places, const nb::list& values, const nb::list& tensors)
      : states_(dicts(states)), hooks_(dicts(hooks)), places_(dicts(places)), values_(all(values)), tensors_(all(tensors)) {
    for (const nb::object& tensor : tensors_) versions_.push_back(version(tensor.ptr()));
  }

  int look() const {
    for (const auto* several : {&states_, &hooks_, &places_, &tensors_})
      for (const nb::object& one : *several) __builtin_prefetch(one.ptr());
    int seen = 0;
    static PyObject* const training = name_of("training");
    for (const nb::object& state : states_) {
      PyObject* const mode = PyDict_GetItemWithError(state.ptr(), training);
      if (!mode && PyErr_Occurred()) throw nb::python_error();
      if (mode != Py_False) seen |= kTraining;
    }
    for (const nb::object& held : hooks_)
      if (PyDict_Size(held.ptr()) > 0) seen |= kHooks;
    return same_values() && same_versions() ? seen : seen | kChanged;
  }

  int visit(visitproc visit, void* arg) const {
    for (const auto* several : {&states_, &hooks_, &places_, &values_, &tensors_})
      for (const nb::object& one : *several) Py_VISIT(one.ptr());
    return 0;
  }
  void clear() {
    for (auto* several : {&states_, &hooks_, &places_, &values_, &tensors_}) {
      std::vector<nb::object> dropped;
      dropped.swap(*several);  // nothing of it is reached from here while it goes
    }
  }

 private:
  static std::vector<nb::object> all(const nb::list& given) {
    std::vector<nb::object> found;
    for (const nb::handle one : given) found.push_back(nb::borrow(one));
    return found;
  }
  static std::vector<nb::object> dicts(const nb::list& given) {
    for (const nb::handle one : given)
      if (!PyDict_Check(one.ptr())) throw nb::type_error("a mapping that is no dict");
    return all(given);
  }

  static long version(PyObject* tensor) {
    static PyObject* const name = name_of("_version");
    const nb::object found = nb::steal(PyObject_GetAttr(tensor, name));
    if (!found.is_valid()) throw nb::python_error();
    const long number = PyLong_AsLong(found.ptr());
    if (number == -1 && PyErr_Occurred()) throw nb::python_error();
    return number;
  }

  bool same_values() const {
    size_t next = 0;
    for (const nb::object& place : places_) {
      PyObject *key, *value;
      for (Py_ssize_t at = 0; PyDict_Next(place.ptr(), &at, &key, &value);)
        if (next == values_.size() || value != values_[next++].ptr()) return false;
    }
    return next == values_.size();
  }

  bool same_versions() const {
    for (size_t i = 0; i < tensors_.size(); i++)
      if (version(tensors_[i].ptr()) != versions_[i]) return false;
    return true;
  }

  std::vector<nb::object> states_, hooks_, places_, values_, tensors_;
  std::vector<long> versions_;
};

int held_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<HeldState>(self)->visit(visit, arg) : 0;
}

int held_clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<HeldState>(self)->clear();  // not where its constructor threw
  return 0;
}

PyType_Slot held_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(held_traverse)},
                            {Py_tp_clear, reinterpret_cast<void*>(held_clear)},
                            {0, nullptr}};

}  // namespace

void bind_held(nb::module_& m) {
  nb::class_<HeldState>(m, "HeldState", nb::type_slots(held_slots))
      .def(nb::init<const nb::list&, const nb::list&, const nb::list&, const nb::list&, const nb::list&>())
      .def("look", &HeldState::look);
}

}  // namespace twofour
