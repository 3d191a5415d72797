// Tensors of a run, and the arithmetic of their shapes.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "ort.h"

namespace twofour::ort {

using Sizes = std::vector<int64_t>;

inline std::string text_of(const Sizes& sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

// Throws Failed where a size is negative or the product of those that are not 0 is beyond int64: that of any of them fits.
inline int64_t count_of(const Sizes& sizes) {
  int64_t all = 1;
  bool empty = false;
  for (const int64_t size : sizes) {
    empty |= size == 0;
    if (size < 0 || (size > 0 && __builtin_mul_overflow(all, size, &all))) throw Failed("no tensor can have shape " + text_of(sizes));
  }
  return empty ? 0 : all;
}

template <class Number>
struct Tensor {
  const Number* data;
  Sizes sizes;
};

template <class Number>
Tensor<Number> input_of(const Api& api, const KernelContext* context, size_t index) {
  const Value* value = nullptr;
  api.check(api.KernelContext_GetInput(context, index, &value));
  if (!value) throw Failed("an input is missing");
  TensorInfo* info = nullptr;
  api.check(api.GetTensorTypeAndShape(value, &info));
  int type = 0;
  size_t axes = 0;
  Status* first = api.GetTensorElementType(info, &type);
  Status* second = api.GetDimensionsCount(info, &axes);
  Sizes sizes(axes);
  Status* third = api.GetDimensions(info, sizes.data(), axes);
  api.ReleaseTensorTypeAndShapeInfo(info);
  for (Status* status : {first, second, third}) api.check(status);
  if (type != (sizeof(Number) == 4 ? kFloat : kInt64)) throw Failed("an input is not " + std::string(sizeof(Number) == 4 ? "float32" : "int64"));
  const void* data = nullptr;
  api.check(api.GetTensorData(value, &data));
  return {static_cast<const Number*>(data), std::move(sizes)};
}

inline float* output_of(const Api& api, KernelContext* context, size_t index, const Sizes& sizes) {
  Value* value = nullptr;
  api.check(api.KernelContext_GetOutput(context, index, sizes.data(), sizes.size(), &value));
  void* data = nullptr;
  api.check(api.GetTensorMutableData(value, &data));
  return static_cast<float*>(data);
}

// The shape of a sum of tensors of two shapes, by the rule of ONNX and numpy.
inline Sizes broadcast(const Sizes& a, const Sizes& b) {
  Sizes all(std::max(a.size(), b.size()));
  for (size_t i = 0; i < all.size(); i++) {
    const size_t left = all.size() - i;
    const int64_t x = left <= a.size() ? a[a.size() - left] : 1, y = left <= b.size() ? b[b.size() - left] : 1;
    if (x != y && x != 1 && y != 1) throw Failed("shapes " + text_of(a) + " and " + text_of(b) + " do not go together");
    all[i] = x == 1 ? y : x;
  }
  return all;
}

// Steps, in numbers, along the axes of `to` of a tensor without gaps that is repeated to that shape.
inline Sizes steps_of(const Sizes& from, const Sizes& to) {
  Sizes steps(to.size(), 0);
  int64_t step = 1;
  for (size_t left = 1; left <= from.size(); left++) {
    const int64_t size = from[from.size() - left];
    if (size != 1) steps[to.size() - left] = step;
    step *= size;
  }
  return steps;
}

// Calls visit(offset in the first, offset in the second) for every number of `sizes` in its order.
template <class Visit>
void for_each(const Sizes& sizes, const Sizes& first, const Sizes& second, const Visit& visit) {
  Sizes at(sizes.size(), 0);
  int64_t a = 0, b = 0;
  for (int64_t left = count_of(sizes); left > 0; left--) {
    visit(a, b);
    for (size_t axis = sizes.size(); axis-- > 0;) {
      a += first[axis], b += second[axis];
      if (++at[axis] < sizes[axis]) break;
      a -= first[axis] * sizes[axis], b -= second[axis] * sizes[axis], at[axis] = 0;
    }
  }
}

// The shape that Reshape gives a tensor of `sizes` for its second operand; throws Failed where there is none.
inline Sizes reshaped(const Sizes& sizes, Sizes wanted, bool zero_copies) {
  const int64_t count = count_of(sizes);
  int64_t* left = nullptr;
  for (size_t i = 0; i < wanted.size(); i++) {
    if (wanted[i] == 0 && zero_copies && i < sizes.size()) wanted[i] = sizes[i];
    if (wanted[i] == -1 && !left) *(left = &wanted[i]) = 1;
  }
  if (const int64_t known = count_of(wanted); left) *left = known ? count / known : 0;
  if (count_of(wanted) != count) throw Failed("a tensor of shape " + text_of(sizes) + " cannot have shape " + text_of(wanted));
  return wanted;
}

}  // namespace twofour::ort
