// Activations as whole numbers: the range of a token, and the token as u8 where the product wants it. The rule is
// written out in nm_matmul/int8/README.md; quantization.py has the same in torch, bit for bit.
// Included once per instruction-set file, with V the vector type of that file; everything has internal linkage.
#pragma once

#include <cstdint>

#include "kernels/matmul.h"
#include "native/compiler.h"
#include "kernels/whole_lanes.h"

namespace {

using twofour::Matmul;
using twofour::Type;

struct Range {
  float scale;
  int32_t zero;
};

constexpr float kLeastScale = 1.17549435e-38f;  // the smallest normal float: its reciprocal is finite

inline bool static_range(const Matmul& a, Range* range) {
  *range = {a.quantization.x_scale, a.quantization.x_zero};
  return !a.quantization.dynamic;
}

// The least and greatest of x and 0, and whether all of x is finite.
struct Span {
  float least, most;
  bool finite;
};

constexpr int64_t kInputsAhead = 2048;  // that are fetched before they are read, those of the next token among them

template <class V, class X>
TWOFOUR_INLINE Span span_of(const X* x, int64_t in) {
  constexpr int chains = 4;
  typename V::reg low[chains], high[chains], broken[chains];
  TWOFOUR_UNROLL
  for (int c = 0; c < chains; c++) low[c] = high[c] = broken[c] = V::zero();
  int64_t k = 0;
  for (; k + chains * V::width <= in; k += chains * V::width) {
    TWOFOUR_UNROLL
    for (int c = 0; c < chains; c++) {
      const typename V::reg v = V::load_unaligned(x + k + c * V::width);
      if (c * V::width % 16 == 0) __builtin_prefetch(x + k + c * V::width + kInputsAhead);
      low[c] = V::min(low[c], v);
      high[c] = V::max(high[c], v);
      broken[c] = V::fma(v, V::zero(), broken[c]);
    }
  }
  for (; k < in; k += V::width) {
    const typename V::reg v = V::load(x + k, in - k);
    low[0] = V::min(low[0], v);
    high[0] = V::max(high[0], v);
    broken[0] = V::fma(v, V::zero(), broken[0]);
  }
  TWOFOUR_UNROLL
  for (int c = 1; c < chains; c++) {
    low[0] = V::min(low[0], low[c]);
    high[0] = V::max(high[0], high[c]);
    broken[0] = broken[0] + broken[c];
  }
  const float nothing = V::sum(broken[0]);
  return {V::smallest(low[0]), V::largest(high[0]), nothing == 0.0f};
}

// The scale that spreads what lies between the least and the greatest of x and 0 over 0 ... `steps`. A token that holds a
// NaN or an infinity has scale NaN, so that all of its outputs are NaN.
template <class V, class X>
TWOFOUR_INLINE Range range_of(const X* x, int64_t in, int32_t steps = 255) {
  const Span span = span_of<V>(x, in);
  float scale = (span.most - span.least) / static_cast<float>(steps);
  if (scale < kLeastScale) scale = kLeastScale;
  if (!span.finite) return {__builtin_nanf(""), 0};
  return {scale, ((typename V::I)V::to_ints(V::all(-span.least / scale)))[0]};
}

// One token as u8 with 8 bytes every `stride`: x is [octet][token][8].
template <class V, class X>
TWOFOUR_INLINE void quantize_token(const X* x, int64_t in, Range range, uint8_t* to, int64_t stride, int most = 255) {
  const Rounder<V> rounder(1.0f / range.scale, range.zero, 0, most);
  int64_t k = 0;
  if (stride == 8)
    for (; k + 4 * V::width <= in; k += 4 * V::width) {
      typename V::ints four[4];
      TWOFOUR_UNROLL
      for (int i = 0; i < 4; i++) four[i] = rounder(V::load_unaligned(x + k + i * V::width));
      V::store_four(to + k, four);
    }
  for (; k + V::width <= in; k += V::width) V::store_x(rounder(V::load_unaligned(x + k)), to, k, stride);
  if (k < in) V::store_x(rounder(V::load(x + k, in - k)), to, k, stride);
}

template <class V, class X>
TWOFOUR_NOINLINE Range real_token(const Matmul& a, const X* x, uint8_t* to, int64_t stride) {
  Range range;
  if (!static_range(a, &range)) range = range_of<V>(x, a.in_features);
  quantize_token<V>(x, a.in_features, range, to, stride);
  return range;
}

// Token `t` of the call, whatever its type, and the range it was given.
template <class V>
inline Range copy_token(const Matmul& a, int64_t t, uint8_t* to, int64_t stride) {
  if (a.x_type == Type::f32) return real_token<V>(a, static_cast<const float*>(a.x) + t * a.x_stride, to, stride);
  if (a.x_type == Type::bf16) return real_token<V>(a, static_cast<const uint16_t*>(a.x) + t * a.x_stride, to, stride);
  const uint8_t* from = static_cast<const uint8_t*>(a.x) + t * a.x_stride;
  int64_t k = stride == 8 ? a.in_features / 8 * 8 : 0;  // then they stand together
  __builtin_memcpy(to, from, static_cast<size_t>(k));
  for (; k + 8 <= a.in_features; k += 8) __builtin_memcpy(to + k / 8 * stride, from + k, 8);
  if (k < a.in_features) __builtin_memcpy(to + k / 8 * stride, from + k, static_cast<size_t>(a.in_features - k));
  Range range{1.0f, 0};
  static_range(a, &range);
  return range;
}

}  // namespace
