// Normalisation row by row: a row stays in the first cache between its passes. Internal linkage.
#pragma once

#include "native/simd.h"
#include "norm.h"

namespace {

using twofour::Norm;

// Rows of X, answers of Y: float, or bfloat16 as uint16_t.
template <class X, class Y>
struct NormRows {
  using V = Lanes;
  using reg = V::reg;

  // Sum over the row of (x - shift)^power, in four sums that hide the adder's latency.
  template <int kPower>
  static float moment(const X* x, int64_t width, float shift) {
    const reg offset = V::all(shift);
    reg sums[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
    int64_t i = 0;
    for (; i + 4 * V::width <= width; i += 4 * V::width)
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        const reg d = V::load_unaligned(x + i + c * V::width) - offset;
        sums[c] = kPower == 1 ? sums[c] + d : V::fma(d, d, sums[c]);
      }
    for (; i + V::width <= width; i += V::width) {
      const reg d = V::load_unaligned(x + i) - offset;
      sums[0] = kPower == 1 ? sums[0] + d : V::fma(d, d, sums[0]);
    }
    float total = V::sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    if (i < width) {
      float tail[V::width];
      V::store_unaligned(tail, V::load_partial(x + i, width - i));
      for (int64_t k = 0; k < width - i; ++k) {
        const float d = tail[k] - shift;
        total += kPower == 1 ? d : d * d;
      }
    }
    return total;
  }

  static reg scaled(const Norm& a, reg x, reg shift, reg factor, int64_t i, int64_t count) {
    reg y = (x - shift) * factor;
    if (a.weight) y = y * V::load_partial(a.weight + i, count);
    return a.bias ? y + V::load_partial(a.bias + i, count) : y;
  }

  static void run(const Norm& a, int64_t begin, int64_t end) {
    const float count = static_cast<float>(a.width);
    for (int64_t row = begin; row < end; ++row) {
      const X* x = static_cast<const X*>(a.x) + row * a.x_stride;
      Y* y = static_cast<Y*>(a.y) + row * a.width;
      const float mean = a.centred ? moment<1>(x, a.width, 0.0f) / count : 0.0f;
      const float root = __builtin_sqrtf(moment<2>(x, a.width, mean) / count + a.eps);
      const reg shift = V::all(mean), factor = V::all(1.0f / root);
      int64_t i = 0;
      for (; i + V::width <= a.width; i += V::width)
        V::store_unaligned(y + i, scaled(a, V::load_unaligned(x + i), shift, factor, i, V::width));
      const int64_t left = a.width - i;
      if (left > 0) V::store_partial(y + i, scaled(a, V::load_partial(x + i, left), shift, factor, i, left), left);
    }
  }
};

template <class X>
void norm_rows(const Norm& a, int64_t begin, int64_t end) {
  if (a.y_bf16) NormRows<X, uint16_t>::run(a, begin, end);
  else NormRows<X, float>::run(a, begin, end);
}

}  // namespace
