// From exact sums to the answer: zero point off, scales and bias in fp32, the epilogue, then fp32, bf16, u8 or s8.
// Included once per instruction-set file, with V the vector type of that file; everything has internal linkage.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/epilogue_math.h"
#include "kernels/matmul.h"
#include "native/compiler.h"
#include "kernels/whole_inputs.h"

namespace {

// Of each row of the weight its scale and its sum, by which the zero point of the activations is taken off. Whole vectors
// can be read from every row on.
struct WholeRows {
  const float* scales;
  const int32_t* sums;
};

// The number itself, rounded: the compiler does not fuse what made it with what follows.
template <class R>
TWOFOUR_INLINE R apart(R value) {
#if defined(__x86_64__)
  asm("" : "+v"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#endif
  return value;
}

// The answers of V::width rows from `row` on, those below `end`, on their way out: bias, epilogue, type.
template <class V>
struct Answers {
  const Matmul& a;
  int64_t row, rows;
  typename V::reg bias;

  TWOFOUR_INLINE Answers(const Matmul& call, int64_t first, int64_t end) : a(call), row(first), rows(end - first) {
    if (rows > V::width) rows = V::width;
    bias = a.bias == nullptr ? V::zero() : V::load(a.bias + row, rows);
  }

  TWOFOUR_INLINE typename V::reg combined(typename V::reg y, int64_t token) const {
    if (a.epilogue.combine == Combine::none) return y;
    const int64_t at = token * a.epilogue.other_stride + row;
    const auto other = a.y_type == Type::bf16 ? V::load(static_cast<const uint16_t*>(a.epilogue.other) + at, rows)
                                              : V::load(static_cast<const float*>(a.epilogue.other) + at, rows);
    return apply_combine<V>(y, other, a.epilogue.combine);
  }

  template <Type type>
  TWOFOUR_INLINE void store(typename V::reg y, int64_t token) const {
    const int64_t at = token * a.y_stride + row;
    if constexpr (type == Type::f32) return V::store(static_cast<float*>(a.y) + at, y, rows);
    if constexpr (type == Type::bf16) return V::store(static_cast<uint16_t*>(a.y) + at, y, rows);
    const int low = a.y_type == Type::u8 ? 0 : -128;
    const Rounder<V> rounder(1.0f / a.quantization.y_scale, a.quantization.y_zero, low, low + 255);
    V::store_bytes(static_cast<uint8_t*>(a.y) + at, rounder(y), rows);
  }

  // A product, scaled; the bias is added.
  template <Activation activation, Type type>
  TWOFOUR_INLINE void leave(typename V::reg scaled, int64_t token) const {
    const auto y = activated<activation, V, type != Type::f32>(apart(scaled) + bias);
    store<type>(combined(y, token), token);
  }
};

// Sums on their way out: with the scales and sums of the rows.
template <class V>
struct Finish : Answers<V> {
  typename V::reg scale;
  typename V::ints sums;

  TWOFOUR_INLINE Finish(const Matmul& call, const WholeRows& weight, int64_t first, int64_t end)
      : Answers<V>(call, first, end), scale(V::load_unaligned(weight.scales + first)),
        sums((typename V::ints)V::load_unaligned(reinterpret_cast<const float*>(weight.sums) + first)) {}

  // (sum - zero * sums) * (x scale * w scale), each operation rounded once.
  TWOFOUR_INLINE typename V::reg product(typename V::ints sum, Range range) const {
    return V::to_real(V::minus_product(sum, sums, range.zero)) * (V::all(range.scale) * scale);
  }
};

// Sums of `vectors` times V::width rows from `row` on, those below `end`, [vector][stride tokens][V::width], to the answers
// of `tokens` tokens from `first` on. `ranges` are those of the whole call.
template <class V, Activation activation, Type type>
TWOFOUR_NOINLINE void finish_as(const Matmul& a, const WholeRows& weight, const int32_t* sums, int64_t vectors,
                                int64_t stride, const Range* ranges, int64_t first, int64_t tokens, int64_t row,
                                int64_t end) {
  for (int64_t v = 0; v < vectors && row + v * V::width < end; v++) {
    const Finish<V> finish(a, weight, row + v * V::width, end);
    for (int64_t t = 0; t < tokens; t++) {
      const auto sum = V::load_ints(reinterpret_cast<const uint8_t*>(sums + (v * stride + t) * V::width));
      finish.template leave<activation, type>(finish.product(sum, ranges[first + t]), first + t);
    }
  }
}

// Calls use(activation, type of the answer) with constants; bytes of either sign are one type.
template <class Use>
inline void with_answers(const Matmul& a, const Use& use) {
  with_activation(a.epilogue.activation, [&](auto kind) {
    if (a.y_type == Type::f32) return use(kind, std::integral_constant<Type, Type::f32>{});
    if (a.y_type == Type::bf16) return use(kind, std::integral_constant<Type, Type::bf16>{});
    use(kind, std::integral_constant<Type, Type::u8>{});
  });
}

template <class V>
inline void finish_sums(const Matmul& a, const WholeRows& weight, const int32_t* sums, int64_t vectors, int64_t stride,
                        const Range* ranges, int64_t first, int64_t tokens, int64_t row, int64_t end) {
  with_answers(a, [&](auto kind, auto type) {
    finish_as<V, kind.value, type.value>(a, weight, sums, vectors, stride, ranges, first, tokens, row, end);
  });
}

}  // namespace
