// Normalisation, a few rows at a time: they stay in the first cache between their passes. Internal linkage.
#pragma once

#include "kernels/whole_lanes.h"
#include "norm.h"

namespace {

using twofour::Norm;

constexpr int kBeside = 4;  // rows at a time

// Rows of X, answers of Y: float, or bfloat16 as uint16_t.
template <class X, class Y>
struct NormRows {
  using V = WholeLanes;
  using reg = V::reg;

  // Sums over each of R rows of (x - shift)^power, in two sums a row. Rows beside each other hide the latency of an adder, and
  // of the sums across that follow. A row's sum is the same whichever rows stand beside it.
  template <int kPower, int R>
  static void moments(const X* const (&x)[R], int64_t width, const float (&shift)[R], float (&total)[R]) {
    reg sums[R][2], offset[R];
    TWOFOUR_UNROLL
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = V::zero(), offset[r] = V::all(shift[r]);
    const auto add = [&](int64_t i, int c) __attribute__((always_inline)) {
      TWOFOUR_UNROLL
      for (int r = 0; r < R; ++r) {
        const reg d = V::load_unaligned(x[r] + i) - offset[r];
        sums[r][c] = kPower == 1 ? sums[r][c] + d : V::fma(d, d, sums[r][c]);
      }
    };
    int64_t i = 0;
    for (; i + 2 * V::width <= width; i += 2 * V::width) add(i, 0), add(i + V::width, 1);
    if (i + V::width <= width) add(i, 0), i += V::width;
    TWOFOUR_UNROLL
    for (int r = 0; r < R; ++r) total[r] = V::sum(sums[r][0] + sums[r][1]);
    if (i == width) return;
    for (int r = 0; r < R; ++r) {
      float tail[V::width];
      V::store_unaligned(tail, V::load_partial(x[r] + i, width - i));
      for (int64_t k = 0; k < width - i; ++k) {
        const float d = tail[k] - shift[r];
        total[r] += kPower == 1 ? d : d * d;
      }
    }
  }

  // Rows [row, row + R), whose answers go to y and, as bytes, to `bytes`.
  template <int R>
  static void rows(const Norm& a, int64_t row, const Rounder<V>& rounder) {
    const float count = static_cast<float>(a.width);
    const X* x[R];
    float mean[R], square[R];
    for (int r = 0; r < R; ++r) x[r] = static_cast<const X*>(a.x) + (row + r) * a.x_stride, mean[r] = 0.0f;
    if (a.centred) {
      float sum[R];
      moments<1>(x, a.width, mean, sum);
      for (int r = 0; r < R; ++r) mean[r] = sum[r] / count;
    }
    moments<2>(x, a.width, mean, square);
    reg shift[R], factor[R];
    TWOFOUR_UNROLL
    for (int r = 0; r < R; ++r)
      shift[r] = V::all(mean[r]), factor[r] = V::all(1.0f / __builtin_sqrtf(square[r] / count + a.eps));
    Y* y = a.y == nullptr ? nullptr : static_cast<Y*>(a.y) + row * a.width;
    uint8_t* bytes = a.bytes == nullptr ? nullptr : a.bytes + row * a.width;
    const auto leave = [&](int64_t i, int64_t left) __attribute__((always_inline)) {
      const reg weight = a.weight ? V::load(a.weight + i, left) : V::zero();
      const reg bias = a.bias ? V::load(a.bias + i, left) : V::zero();
      TWOFOUR_UNROLL
      for (int r = 0; r < R; ++r) {
        // Every multiply-add is written out, so that a row's answer is the same whichever rows stand beside it.
        const reg d = V::load(x[r] + i, left) - shift[r];
        reg v;
        if (a.weight) v = a.bias ? V::fma(d * factor[r], weight, bias) : d * factor[r] * weight;
        else v = a.bias ? V::fma(d, factor[r], bias) : d * factor[r];
        if (y != nullptr) V::store(y + r * a.width + i, v, left);
        if (bytes != nullptr) V::store_bytes(bytes + r * a.width + i, rounder(v), left);
      }
    };
    int64_t i = 0;
    for (; i + V::width <= a.width; i += V::width) leave(i, V::width);
    if (i < a.width) leave(i, a.width - i);
  }

  static void run(const Norm& a, int64_t begin, int64_t end) {
    const Rounder<V> rounder(1.0f / a.bytes_scale, a.bytes_zero, 0, 255);
    int64_t row = begin;
    for (; row + kBeside <= end; row += kBeside) rows<kBeside>(a, row, rounder);
    for (; row < end; ++row) rows<1>(a, row, rounder);
  }
};

template <class X>
void norm_rows(const Norm& a, int64_t begin, int64_t end) {
  if (a.y_bf16) NormRows<X, uint16_t>::run(a, begin, end);
  else NormRows<X, float>::run(a, begin, end);
}

}  // namespace
