// The dense weight of kernels/int4/row_products.h: activations are broadcast four at a time, nothing is permuted. Internal
// linkage.
#pragma once

#include "kernels/byte_dots.h"
#include "kernels/int4/row_products.h"

namespace {

using twofour::kInt4DenseBlockBytes;

struct Dense {
  using V = WholeLanes;
  static constexpr int64_t kBlockBytes = kInt4DenseBlockBytes;
  static constexpr bool kUnsigned = false;  // weights are 0..15; their zero points come off the sums
  static constexpr int64_t kFar = 32 * kInt4DenseBlockBytes, kNear = 8 * kInt4DenseBlockBytes;

  template <bool Zeros>
  static constexpr float kTimes = 1.0f;

  static TWOFOUR_INLINE void fetch(const uint8_t* line) {
    _mm_prefetch(reinterpret_cast<const char*>(line) + kFar, _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(line) + kNear, _MM_HINT_T0);
  }

  template <int T, int N, bool Zeros>
  static TWOFOUR_INLINE void add_block(const uint8_t* block, const uint8_t* x, const V::ints (&)[N], V::ints (&high)[N][T],
                                       V::ints (&low)[N][T]) {
    TWOFOUR_UNROLL
    for (int s = 0; s < 4; s++) {
      V::ints w[N][2];
      TWOFOUR_UNROLL
      for (int v = 0; v < N; v++) {
        const uint8_t* at = block + lane_bytes<Dense>(v * V::width) + s * 64;
        if (v * V::width % kInt4Half == 0) fetch(at);
        const auto line = (V::U)V::load_index(at);
        w[v][0] = (V::ints)(line & 0x0f0f0f0fu);
        w[v][1] = (V::ints)(line >> 4 & 0x0f0f0f0fu);
      }
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) {
        const auto* four = reinterpret_cast<const float*>(x + (s * T + t) * 16);
        TWOFOUR_UNROLL
        for (int g = 0; g < 2; g++) {
          const auto x_high = (V::ints)V::broadcast(four + g), x_low = (V::ints)V::broadcast(four + 2 + g);
          TWOFOUR_UNROLL
          for (int v = 0; v < N; v++) {
            high[v][t] = dot_bytes<V, false>(high[v][t], w[v][g], x_high);
            low[v][t] = dot_bytes<V, false>(low[v][t], w[v][g], x_low);
          }
        }
      }
    }
  }
};

}  // namespace
