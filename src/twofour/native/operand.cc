// Tensors read through DLPack's exchange table, and the refusals of the border.
#include "operand.h"

#include <nanobind/stl/string.h>

#include "dlpack.h"

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
  if (!given.is_valid()) return "None";
  try {
    const nb::object shape = nb::module_::import_("builtins").attr("tuple")(given.attr("shape"));
    return nb::cast<std::string>(nb::str("{} {} on {}").format(given.attr("dtype"), shape, given.attr("device")));
  } catch (const nb::python_error&) {
    return "a " + nb::cast<std::string>(nb::str(given.type().attr("__name__")));
  }
}

std::string described(const View& view) {
  std::string shape;
  for (int i = 0; i < view.ndim; i++) shape += (i ? ", " : "") + std::to_string(view.shape[i]);
  return Types{view.type}.text() + " (" + shape + ") of a recorded program";
}

std::string text_of(nb::handle given) {
  const auto name = nb::cast<std::string>(nb::str(given.type().attr("__name__")));
  return name == "Tensor" || name == "Parameter" ? "" : ", a " + name;
}

}  // namespace

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

std::string Types::text() const {
  constexpr const char* names[] = {"float32", "bfloat16", "uint8", "int8", "bool", "int64"};
  std::string all;
  for (int i = 0; i < 6; i++)
    if (bits_ >> i & 1) all += (all.empty() ? "torch." : " or torch.") + std::string(names[i]);
  return all;
}

int64_t View::count() const {
  int64_t count = 1;
  for (int i = 0; i < ndim; i++) count *= shape[i];
  return count;
}

bool View::contiguous() const {
  int64_t step = 1;
  for (int i = ndim - 1; i >= 0; step *= shape[i--])
    if (shape[i] != 1 && strides[i] != step) return count() == 0;
  return true;
}

Numbers::Numbers(const View& from, int64_t count) : data_(reinterpret_cast<const float*>(from.data)) {
  if (from.contiguous()) return;
  copy_.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; i++) copy_[static_cast<size_t>(i)] = data_[i * from.strides[0]];
}

View Border::strided(const Operand& operand, const char* role, Types types) const {
  DLTensor seen{};
  if (!operand.given()) refuse(operand, role, "a tensor");
  if (operand.described) {
    if (!types.has(operand.described->type)) refuse(operand, role, types.text() + " on cpu");
    return *operand.described;
  }
  if (exchange().dltensor_from_py_object_no_sync(operand.tensor.ptr(), &seen) != 0) {
    PyErr_Clear();  // torch's words name neither the call nor the operand
    refuse(operand, role, types.text() + " on cpu", "pass a dense tensor on the CPU: x.cpu(), x.to_dense()");
  }
  const View view{static_cast<char*>(seen.data) + seen.byte_offset, type_of(seen.dtype), seen.dtype.bits / 8,
                  seen.ndim, seen.shape, seen.strides};
  if (seen.device.device_type != kDLCPU) refuse(operand, role, types.text() + " on cpu", "move it: x.cpu()");
  if (!types.has(view.type)) refuse(operand, role, types.text() + " on cpu");
  if (seen.data == nullptr && view.count() != 0)
    refuse(operand, role, "a tensor with memory of its own",
           "fake, functional, zero and wrapper tensors and freed storage have none: pass the plain tensor behind them");
  return view;
}

View Border::dense(const Operand& operand, const char* role, Types types) const {
  const View view = strided(operand, role, types);
  if (!view.contiguous()) refuse(operand, role, "a contiguous tensor", "copy it: x.contiguous()");
  return view;
}

View Border::exactly(const Operand& operand, const char* role, Types types, int64_t count) const {
  const View view = dense(operand, role, types);
  if (view.count() != count) refuse(operand, role, types.text() + " of " + std::to_string(count) + " numbers on cpu");
  return view;
}

Rows Border::rows(const Operand& operand, const char* role, Types types) const {
  const View view = strided(operand, role, types);
  if (view.ndim == 0) refuse(operand, role, types.text() + " (..., width) on cpu");
  const int last = view.ndim - 1;
  Rows found{view.data, view.type, 1, view.shape[last], view.shape[last]};
  bool even = found.width <= 1 || view.strides[last] == 1, set = false;
  for (int i = last - 1; i >= 0; i--) {
    if (view.shape[i] == 1) continue;
    if (!set) found.stride = view.strides[i];
    else even = even && view.strides[i] == found.stride * found.rows;
    set = true;
    found.rows *= view.shape[i];
  }
  if (!even && found.rows != 0) refuse(operand, role, "rows of contiguous numbers", "copy it: x.contiguous()");
  return found;
}

Numbers Border::numbers(const Operand& operand, const char* role, int64_t count) const {
  if (!operand.given()) return {};
  const View view = strided(operand, role, kAnyType);
  if (view.type != Type::f32 || view.count() != count || (view.ndim != 1 && !view.contiguous()))
    refuse(operand, role, "torch.float32 (" + std::to_string(count) + ",) on cpu",
           "give the layer what it was compiled with: float32, on the CPU");
  return {view, count};
}

void Border::refuse(const Operand& operand, const char* role, const std::string& wanted,
                    const std::string& remedy) const {
  std::string got = operand.described ? described(*operand.described) : described(operand.tensor);
  if (operand.tensor.is_valid()) got += text_of(operand.tensor);
  throw Refusal{std::string(call_) + " cannot read its " + role, got, wanted, remedy};
}

void Border::damaged() const {
  throw Refusal{std::string(call_) + " was given a damaged weight", "bytes that no packing writes, behind a sound header",
                "what kernel.prepare returned, unchanged", "prepare or load the weight again"};
}

}  // namespace twofour
