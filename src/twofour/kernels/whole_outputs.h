// From exact sums to the answer: zero point off, scales and bias in fp32, the epilogue, then fp32, bf16, u8 or s8.
// Included once per instruction-set file, with V the vector type of that file; everything has internal linkage.
#pragma once

#include <cstdint>

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

// What V::width rows from `row` on, those below `end`, need: their scales, sums and bias.
template <class V>
struct Finish {
  const Matmul& a;
  int64_t row, rows;
  typename V::reg scale, bias;
  typename V::ints sums;

  TWOFOUR_INLINE Finish(const Matmul& call, const WholeRows& weight, int64_t first, int64_t end)
      : a(call), row(first), rows(end - first) {
    if (rows > V::width) rows = V::width;
    scale = V::load_unaligned(weight.scales + row);
    sums = (typename V::ints)V::load_unaligned(reinterpret_cast<const float*>(weight.sums) + row);
    bias = a.bias == nullptr ? V::zero() : V::load(a.bias + row, rows);
  }

  // (sum - zero * sums) * (x scale * w scale) + bias, each operation rounded once: the barrier keeps the compiler from
  // fusing the last two.
  TWOFOUR_INLINE typename V::reg product(typename V::ints sum, Range range) const {
    const typename V::reg exact = V::to_real(V::minus_product(sum, sums, range.zero));
    typename V::reg scaled = exact * (V::all(range.scale) * scale);
#if defined(__x86_64__)
    asm("" : "+v"(scaled));
#elif defined(__aarch64__)
    asm("" : "+w"(scaled));
#endif
    return scaled + bias;
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
      const auto y = activated<activation, V, type != Type::f32>(finish.product(sum, ranges[first + t]));
      finish.template store<type>(finish.combined(y, first + t), first + t);
    }
  }
}

template <class V>
inline void finish_sums(const Matmul& a, const WholeRows& weight, const int32_t* sums, int64_t vectors, int64_t stride,
                        const Range* ranges, int64_t first, int64_t tokens, int64_t row, int64_t end) {
  with_activation(a.epilogue.activation, [&](auto constant) {
    constexpr Activation kind = decltype(constant)::value;
    const auto as = a.y_type == Type::f32    ? finish_as<V, kind, Type::f32>
                    : a.y_type == Type::bf16 ? finish_as<V, kind, Type::bf16>
                                             : finish_as<V, kind, Type::u8>;
    as(a, weight, sums, vectors, stride, ranges, first, tokens, row, end);
  });
}

}  // namespace
