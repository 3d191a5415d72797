// The border's questions to operands, and its refusals.
#include "operand.h"

namespace twofour {
namespace {

constexpr uintptr_t kLeastAddress = 1 << 16;

std::string described(const View& view) {
  std::string shape;
  for (int i = 0; i < view.ndim; i++) shape += (i ? ", " : "") + std::to_string(view.shape[i]);
  return Types{view.type}.text() + " (" + shape + ") of a recorded program";
}

}  // namespace

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
  if (!operand.given()) refuse(operand, role, "a tensor");
  if (operand.described) {
    if (!types.has(operand.described->type)) refuse(operand, role, types.text() + " on cpu");
    return *operand.described;
  }
  View view;
  switch (tensor_reader.read(operand.tensor, &view)) {
    case TensorReader::none:
      refuse(operand, role, types.text() + " on cpu", "pass a dense tensor on the CPU: x.cpu(), x.to_dense()");
    case TensorReader::elsewhere:
      refuse(operand, role, types.text() + " on cpu", "move it: x.cpu()");
    case TensorReader::memory:
      break;
  }
  if (!types.has(view.type)) refuse(operand, role, types.text() + " on cpu");
  // A view into what has no memory has its offset for an address. The first 64 KB are no program's.
  if (reinterpret_cast<uintptr_t>(view.data) < kLeastAddress && view.count() != 0)
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
  const std::string got = operand.described ? described(*operand.described)
                          : operand.tensor  ? tensor_reader.describe(operand.tensor)
                                            : "None";
  throw Refusal{std::string(call_) + " cannot read its " + role, got, wanted, remedy};
}

void Border::damaged() const {
  throw Refusal{std::string(call_) + " was given a damaged weight", "bytes that no packing writes, behind a sound header",
                "what kernel.prepare returned, unchanged", "prepare or load the weight again"};
}

}  // namespace twofour
