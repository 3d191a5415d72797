// A program of native calls and of calls of Python, recorded once for a set of sizes and run again without looking at them.
//
// Every tensor of a native call is a place: bytes behind the address of one of the run's buffers, with the geometry it was
// recorded with. Places are held against their buffers when the program is made, buffers against theirs in each run, and
// the border of each call looks at the descriptors as it does at tensors.
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "binding.h"
#include "geometry.h"

namespace twofour {
namespace {

thread_local PyObject* listener = nullptr;

using Fields = std::tuple<int, int64_t, std::vector<int64_t>, std::vector<int64_t>>;  // type, bytes of a number, shape, strides

Geometry geometry_of(const Fields& fields) {
  const auto& [type, width, shape, strides] = fields;
  return Geometry(static_cast<Type>(type), width, shape, strides);
}

// A tensor inside the buffer that the run's value `value` is.
struct Place {
  int value;
  int64_t offset;
  Geometry geometry;
};

constexpr int kNone = -1;
constexpr size_t kMostArguments = 24;

struct Call {
  nb::object callee;           // a RecordedCall, or what Python calls
  const RecordedCall* step = nullptr;  // the same, where it is one
  std::vector<int> operands;   // of a step: places, kNone for None, or -2 - a value that is a tensor at each run
  std::vector<int> arguments;  // of a callable: values
  nb::object names;            // of the last arguments, or null
  std::vector<int> results;    // values, kNone for what nobody reads; several: of a sequence
  std::vector<int> dropped;    // values that nobody reads any more
};

class Executor {
 public:
  // buffers: value, geometry. places: value, bytes from its first number, geometry. calls: callee, operands or
  // arguments, names or None, results, dropped.
  Executor(const std::vector<std::tuple<int, Fields>>& buffers,
           const std::vector<std::tuple<int, int64_t, Fields>>& places,
           const std::vector<std::tuple<nb::object, std::vector<int>, nb::object, std::vector<int>, std::vector<int>>>& calls,
           int values, int given)
      : values_(values), given_(given), buffer_of_(static_cast<size_t>(values), kNone) {
    for (const auto& [value, fields] : buffers) {
      buffer_of_[in(value)] = static_cast<int>(buffers_.size());
      buffers_.push_back({value, 0, geometry_of(fields)});
    }
    for (const auto& [value, offset, fields] : places) {
      places_.push_back({value, offset, geometry_of(fields)});
      const int buffer = buffer_of_[in(value)];
      if (buffer == kNone || offset < 0 ||
          offset > buffers_[static_cast<size_t>(buffer)].geometry.reach() - places_.back().geometry.reach())
        throw std::invalid_argument("a place outside its buffer");
    }
    for (const auto& [callee, operands, names, results, dropped] : calls) {
      Call call{callee, nullptr, {}, {}, {}, results, dropped};
      if (nb::isinstance<RecordedCall>(callee)) call.step = &nb::cast<const RecordedCall&>(callee), call.operands = operands;
      else call.arguments = operands;
      if (!names.is_none()) call.names = names;
      for (const int operand : call.operands)
        if (operand <= -2) in(-2 - operand);
        else if (operand >= static_cast<int>(places_.size())) throw std::invalid_argument("no such place");
      for (const int value : call.arguments) in(value);
      if (call.arguments.size() > kMostArguments) throw std::invalid_argument("too many arguments");
      if (call.names.is_valid() && (!PyTuple_Check(call.names.ptr()) || nb::len(call.names) > call.arguments.size()))
        throw std::invalid_argument("no such names");
      for (const int value : call.results)
        if (value != kNone) in(value);
      for (const int value : call.dropped) in(value);
      calls_.push_back(std::move(call));
    }
  }

  // What the collector of cycles asks: a callable may reach, by what it closes over, the owner of this program.
  int visit(visitproc visit, void* arg) const {
    for (const Call& call : calls_) {
      Py_VISIT(call.callee.ptr());
      Py_VISIT(call.names.ptr());
    }
    return 0;
  }
  void clear() { calls_.clear(); }

  // `values`: what the run is given first, then what it reads, then room for results. False: a tensor is not what it was
  // when the program was recorded.
  bool run(const nb::list& values) const {
    if (static_cast<int>(nb::len(values)) != values_) throw std::invalid_argument("another number of values");
    std::vector<char*> bases(buffer_of_.size(), nullptr);
    for (const Place& buffer : buffers_)
      if (buffer.value < given_ && !look(values, buffer.value, &bases)) return false;
    std::vector<View> views;
    std::vector<Operand> operands;
    for (const Call& call : calls_) {
      if (call.step) {
        views.clear(), operands.clear();
        views.reserve(call.operands.size());  // operands point at them
        for (const int operand : call.operands) {
          if (operand == kNone) {
            operands.push_back({});
          } else if (operand < kNone) {
            operands.push_back({PyList_GetItem(values.ptr(), -2 - operand)});
          } else {
            const Place& place = places_[static_cast<size_t>(operand)];
            views.push_back(place.geometry.at(bases[static_cast<size_t>(place.value)] + place.offset));
            operands.push_back({{}, &views.back()});
          }
        }
        if (!call.step->run(operands.data(), 0)) return false;
      } else if (!call_python(call, values, &bases)) {
        return false;
      }
      for (const int value : call.dropped) put(values, value, nb::none().release().ptr());
    }
    return true;
  }

 private:
  size_t in(int value) const {
    if (value < 0 || value >= values_) throw std::invalid_argument("no such value");
    return static_cast<size_t>(value);
  }

  static void put(const nb::list& values, int value, PyObject* owned) { PyList_SetItem(values.ptr(), value, owned); }

  // Takes a buffer's address, where it still is what it was.
  bool look(const nb::list& values, int value, std::vector<char*>* bases) const {
    const int buffer = buffer_of_[static_cast<size_t>(value)];
    if (buffer == kNone) return true;
    const View view = Border("a recorded program").strided(Operand{PyList_GetItem(values.ptr(), value)}, "buffer", kEveryType);
    (*bases)[static_cast<size_t>(value)] = view.data;
    return buffers_[static_cast<size_t>(buffer)].geometry.is(view);
  }

  bool call_python(const Call& call, const nb::list& values, std::vector<char*>* bases) const {
    PyObject* arguments[kMostArguments + 1] = {};
    for (size_t i = 0; i < call.arguments.size(); i++)
      arguments[i + 1] = PyList_GetItem(values.ptr(), call.arguments[i]);
    const size_t named = call.names.is_valid() ? nb::len(call.names) : 0;
    const nb::object result = nb::steal(nb::detail::vectorcall(
        call.callee.ptr(), arguments + 1, (call.arguments.size() - named) | NB_VECTORCALL_ARGUMENTS_OFFSET,
        call.names.ptr()));
    if (!result.is_valid()) throw nb::python_error();
    for (size_t i = 0; i < call.results.size(); i++) {
      if (call.results[i] == kNone) continue;
      nb::object one = call.results.size() == 1 ? result : nb::steal(PySequence_GetItem(result.ptr(), static_cast<Py_ssize_t>(i)));
      if (!one.is_valid()) throw nb::python_error();
      put(values, call.results[i], one.release().ptr());
      if (!look(values, call.results[i], bases)) return false;
    }
    return true;
  }

  static constexpr Types kEveryType = kAnyType;

  int values_, given_;
  std::vector<Place> buffers_, places_;
  std::vector<int> buffer_of_;
  std::vector<Call> calls_;
};

int executor_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<Executor>(self)->visit(visit, arg) : 0;
}

int executor_clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<Executor>(self)->clear();  // not where its constructor threw
  return 0;
}

PyType_Slot executor_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(executor_traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(executor_clear)},
                                {0, nullptr}};

}  // namespace

nb::handle recorder() { return listener; }

void tell_recorder(RecordedCall call, const std::vector<RecordedOperand>& operands) {
  nb::list tensors, written;
  for (const auto& [one, writes] : operands) {
    tensors.append(one.tensor ? nb::borrow(static_cast<PyObject*>(one.tensor)) : nb::none());
    written.append(writes);
  }
  const nb::handle told(listener);
  told(nb::cast(std::move(call)), tensors, written);
}

void bind_executor(nb::module_& m) {
  nb::class_<RecordedCall>(m, "RecordedCall")
      .def_ro("name", &RecordedCall::name)
      .def("arguments", [](const RecordedCall& call) {  // but for its operands, as `Argument` writes them
        ByteWriter to;
        call.write(to);
        return nb::bytes(to.bytes().data(), to.bytes().size());
      });
  // Tells `told` (call, tensors, whether each is written) of each native call of this thread; None: nobody. The caller keeps it alive.
  m.def("record_calls", [](const nb::object& told) { listener = told.is_none() ? nullptr : told.ptr(); }, nb::arg().none());
  nb::class_<Executor>(m, "Executor", nb::type_slots(executor_slots))
      .def(nb::init<const std::vector<std::tuple<int, Fields>>&, const std::vector<std::tuple<int, int64_t, Fields>>&,
                    const std::vector<std::tuple<nb::object, std::vector<int>, nb::object, std::vector<int>, std::vector<int>>>&,
                    int, int>())
      .def("run", &Executor::run);
}

}  // namespace twofour
