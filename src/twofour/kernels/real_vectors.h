// Activations in and answers out of products of real numbers: float32 or bfloat16, whatever the weight. V: native/simd.h.
#pragma once

#include <cstdint>

#include "kernels/epilogue_math.h"
#include "kernels/matmul.h"
#include "native/compiler.h"
#include "native/team.h"
#include "native/integers.h"

namespace {

using twofour::Matmul;
using twofour::Type;

// Where element (row, column) of x, y or the epilogue's other operand stands; all are float32 or bfloat16.
TWOFOUR_INLINE const char* element(const void* base, Type type, int64_t at) {
  return static_cast<const char*>(base) + at * (type == Type::f32 ? 4 : 2);
}

// `count` numbers as floats, the rest of the vector zero.
template <class V>
TWOFOUR_INLINE typename V::reg load_numbers(const char* from, Type type, int64_t count) {
  return type == Type::bf16 ? V::load(reinterpret_cast<const uint16_t*>(from), count)
                            : V::load(reinterpret_cast<const float*>(from), count);
}
// The same, rounded to bfloat16: the operand of every product.
template <class V>
TWOFOUR_INLINE typename V::reg load_rounded(const char* from, Type type, int64_t count) {
  const typename V::reg x = load_numbers<V>(from, type, count);
  return type == Type::bf16 ? x : V::rounded(x);
}

template <class V>
TWOFOUR_INLINE void store_numbers(char* to, Type type, typename V::reg x, int64_t count) {
  if (type == Type::bf16) V::store(reinterpret_cast<uint16_t*>(to), x, count);
  else V::store(reinterpret_cast<float*>(to), x, count);
}

// Apart from the loops: the activations are long and a plain product never calls it.
template <class V>
TWOFOUR_NOINLINE typename V::reg epilogue_of(const Matmul& a, int64_t token, int64_t row, int64_t count,
                                             typename V::reg x) {
  x = apply_activation<V>(x, a.epilogue.activation);
  if (a.epilogue.combine == Combine::none) return x;
  const char* other = element(a.epilogue.other, a.y_type, token * a.epilogue.other_stride + row);
  return apply_combine<V>(x, load_numbers<V>(other, a.y_type, count), a.epilogue.combine);
}

// Sums with their bias of outputs [row, row + count) of one token -> y.
template <class V>
TWOFOUR_INLINE void store_outputs(const Matmul& a, int64_t token, int64_t row, int64_t count, typename V::reg sums) {
  if (!a.epilogue.plain()) sums = epilogue_of<V>(a, token, row, count, sums);
  char* y = const_cast<char*>(element(a.y, a.y_type, token * a.y_stride + row));
  store_numbers<V>(y, a.y_type, sums, count);
}

template <class V>
TWOFOUR_INLINE typename V::reg bias_of(const Matmul& a, int64_t row, int64_t count) {
  return a.bias == nullptr ? V::zero() : V::load(a.bias + row, count);
}

}  // namespace
