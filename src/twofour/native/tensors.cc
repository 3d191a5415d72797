// Tensors of Python, read for the border through DLPack's exchange table, which torch offers on its type: data, device, dtype,
// shape and strides in some 60 ns, about what `tensor.data_ptr()` alone costs, and without the ABI of libtorch. DLPack does
// not tell how many bytes stand behind a tensor: one whose storage was shrunk to something under it, which torch's own
// operators read past too, is not seen.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "dlpack.h"
#include "operand.h"

namespace nb = nanobind;

namespace twofour {
namespace {

// torch.Tensor's table. It lives as long as torch, which is never unloaded.
const DLPackExchangeAPI& exchange() {
  static const DLPackExchangeAPI* const table = [] {
    const nb::object type = nb::module_::import_("torch").attr("Tensor");
    const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
    const auto* found = capsule.is_none() ? nullptr
                                          : static_cast<const DLPackExchangeAPI*>(
                                                PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (found == nullptr || found->version.major != kDlpackMajor || found->dltensor_from_py_object_no_sync == nullptr) {
      PyErr_Clear();
      throw Refusal{"this torch does not let the kernels look at its tensors",
                    "torch.Tensor without a table of DLPack 1 for exchange", "torch 2.11 or newer",
                    "pip install -U torch"};
    }
    return found;
  }();
  return *table;
}

Type type_of(const DLDataType& dtype) {
  if (dtype.lanes != 1) return Type::other;
  switch (dtype.code << 8 | dtype.bits) {
    case kDLFloat << 8 | 32: return Type::f32;
    case kDLBfloat << 8 | 16: return Type::bf16;
    case kDLUInt << 8 | 8: return Type::u8;
    case kDLInt << 8 | 8: return Type::s8;
    case kDLBool << 8 | 8: return Type::boolean;
    case kDLInt << 8 | 64: return Type::s64;
    default: return Type::other;
  }
}

// "torch.float32 (8, 64) on cpu", or the type of what is no tensor or does not tell.
std::string described(nb::handle given) {
  try {
    const nb::object shape = nb::module_::import_("builtins").attr("tuple")(given.attr("shape"));
    return nb::cast<std::string>(nb::str("{} {} on {}").format(given.attr("dtype"), shape, given.attr("device")));
  } catch (const nb::python_error&) {
    return "a " + nb::cast<std::string>(nb::str(given.type().attr("__name__")));
  }
}

std::string kind_of(nb::handle given) {
  const auto name = nb::cast<std::string>(nb::str(given.type().attr("__name__")));
  return name == "Tensor" || name == "Parameter" ? "" : ", a " + name;
}

TensorReader::Found read(void* tensor, View* view) {
  DLTensor seen{};
  if (exchange().dltensor_from_py_object_no_sync(tensor, &seen) != 0) {
    PyErr_Clear();  // torch's words name neither the call nor the operand
    return TensorReader::none;
  }
  *view = {static_cast<char*>(seen.data) + seen.byte_offset, type_of(seen.dtype), seen.dtype.bits / 8, seen.ndim, seen.shape,
           seen.strides};
  return seen.device.device_type == kDLCPU ? TensorReader::memory : TensorReader::elsewhere;
}

std::string describe(void* tensor) {
  const nb::handle given(static_cast<PyObject*>(tensor));
  return described(given) + kind_of(given);
}

void translate_refusals() {
  // Called where the exception is handled, so it can be thrown on: a copy of its pointer would take functions that the
  // libstdc++ of GCC 10 lacks (CXXABI_1.3.13).
  nb::register_exception_translator([](const std::exception_ptr&, void*) {
    try {
      throw;
    } catch (const Refusal& refusal) {
      const nb::object kind = nb::module_::import_("twofour.errors").attr("KernelError");
      nb::dict parts;
      parts["got"] = refusal.got;
      parts["wanted"] = refusal.wanted;
      parts["remedy"] = refusal.remedy;
      PyErr_SetObject(kind.ptr(), kind(refusal.what, **parts).ptr());
    }
  });
}

}  // namespace

void read_tensors() {
  tensor_reader = {read, describe};
  python_lock = {[] { return static_cast<void*>(PyEval_SaveThread()); },
                 [](void* state) { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); }};
  translate_refusals();
}

}  // namespace twofour
