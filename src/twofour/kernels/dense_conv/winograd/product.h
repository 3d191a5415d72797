// The inner product of one place: tiles x input channels by input channels x 32 output channels, sums in registers.
#pragma once

#include <cstdint>

#include "kernels/dense_conv/dense_conv.h"
#include "native/compiler.h"
#include "native/integers.h"

namespace {

// `Rows` tiles by two vectors of output channels. The inputs of a vector of channels stand `step` floats from the next,
// in each a vector per tile. `ahead`: memory to fetch into the second-level cache, a line for each channel.
template <class V, int Rows>
TWOFOUR_NOINLINE void multiply_rows(const float* x, int64_t step, int64_t channels, const float* w, float* to,
                                    const float* ahead) {
  typename V::reg sums[Rows][2];
  TWOFOUR_UNROLL
  for (int r = 0; r < Rows; r++) sums[r][0] = sums[r][1] = V::zero();
  for (int64_t left = channels; left > 0; left -= V::width, x += step) {
    const int64_t count = least(left, V::width);
    for (int64_t j = 0; j < count; j++, w += twofour::kConvPanel, ahead += 16) {
      __builtin_prefetch(ahead, 0, 2);
      const typename V::reg w0 = V::load_shared(w), w1 = V::load_shared(w + V::width);
      TWOFOUR_UNROLL
      for (int r = 0; r < Rows; r++) {
        const typename V::reg one = V::broadcast_shared(x + r * V::width + j);
        sums[r][0] = V::fma(one, w0, sums[r][0]);
        sums[r][1] = V::fma(one, w1, sums[r][1]);
      }
    }
  }
  TWOFOUR_UNROLL
  for (int r = 0; r < Rows; r++) {
    V::store_aligned(to + r * twofour::kConvPanel, sums[r][0]);
    V::store_aligned(to + r * twofour::kConvPanel + V::width, sums[r][1]);
  }
}

template <class V, int Most>
TWOFOUR_INLINE void multiply_some(int64_t rows, const float* x, int64_t step, int64_t channels, const float* w,
                                  float* to, const float* ahead) {
  if (rows == Most) multiply_rows<V, Most>(x, step, channels, w, to, ahead);
  else if constexpr (Most > 1) multiply_some<V, Most - 1>(rows, x, step, channels, w, to, ahead);
}

}  // namespace
