// Squeeze-and-excite: means of the channels, two small products, a gate, the scaled image. Internal linkage.
#pragma once

#include "kernels/epilogue_math.h"
#include "native/simd.h"
#include "native/team.h"
#include "squeeze_excite.h"

namespace {

using twofour::Gate;
using twofour::kSqueezeBlock;
using twofour::SqueezeExcite;

template <class V>
struct SqueezeBlocks {
  using F = typename V::reg;
  static constexpr int kVectors = 4;

  // to[c] = start[c] + the sum of `rows` rows, `stride` apart, each times its factor where there are some; start may be null.
  template <int N, bool kFactors>
  static TWOFOUR_INLINE void add_rows(const float* from, int64_t stride, int64_t rows, const float* factors,
                                      const float* start, int64_t channels, float* to) {
    F sum[N];
    TWOFOUR_UNROLL
    for (int n = 0; n < N; n++) sum[n] = start ? V::load(start + n * V::width, channels - n * V::width) : V::zero();
    for (int64_t r = 0; r < rows; r++, from += stride) {
      const F factor = kFactors ? V::all(factors[r]) : V::zero();
      TWOFOUR_UNROLL
      for (int n = 0; n < N; n++) {
        const F one = V::load(from + n * V::width, channels - n * V::width);
        sum[n] = kFactors ? V::fma(one, factor, sum[n]) : sum[n] + one;
      }
    }
    TWOFOUR_UNROLL
    for (int n = 0; n < N; n++) V::store(to + n * V::width, sum[n], channels - n * V::width);
  }
  template <bool kFactors>
  static void sum_rows(const float* from, int64_t stride, int64_t rows, const float* factors, const float* start,
                       int64_t channels, float* to) {
    int64_t c = 0;
    for (; c + kVectors * V::width <= channels; c += kVectors * V::width)
      add_rows<kVectors, kFactors>(from + c, stride, rows, factors, start ? start + c : nullptr, kVectors * V::width, to + c);
    for (; c < channels; c += V::width)
      add_rows<1, kFactors>(from + c, stride, rows, factors, start ? start + c : nullptr, channels - c, to + c);
  }

  static float dot(const float* a, const float* b, int64_t count) {
    F sum[kVectors] = {V::zero(), V::zero(), V::zero(), V::zero()};
    int64_t i = 0;
    for (; i + kVectors * V::width <= count; i += kVectors * V::width) {
      TWOFOUR_UNROLL
      for (int n = 0; n < kVectors; n++)
        sum[n] = V::fma(V::load_unaligned(a + i + n * V::width), V::load_unaligned(b + i + n * V::width), sum[n]);
    }
    for (; i < count; i += V::width) sum[0] = V::fma(V::load(a + i, count - i), V::load(b + i, count - i), sum[0]);
    return V::sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }

  static TWOFOUR_INLINE F gated(F x, Gate gate) {
    using M = FloatMath<V>;
    return gate == Gate::sigmoid ? V::all(1.0f) / (M::template exp_of<true>(x) + 1.0f)
                                 : M::at_most(6.0f, M::at_least(0.0f, x + 3.0f)) * (1.0f / 6.0f);
  }

  // One image's sums of blocks -> its scales, in the place of the first block's.
  static void excite(const SqueezeExcite& a, float* sums) {
    const int64_t channels = a.channels;
    float* squeezed = sums + a.blocks() * channels;
    sum_rows<false>(sums + channels, channels, a.blocks() - 1, nullptr, sums, channels, sums);
    for (int64_t c = 0; c < channels; c += V::width) {
      const F mean = V::load(sums + c, channels - c) / V::all(static_cast<float>(a.pixels));
      V::store(sums + c, mean, channels - c);
    }
    for (int64_t s = 0; s < a.squeezed; s++)
      squeezed[s] = dot(a.reduce + s * channels, sums, channels) + (a.reduce_bias ? a.reduce_bias[s] : 0.0f);
    for (int64_t s = 0; s < a.squeezed; s += V::width) {
      const int64_t left = a.squeezed - s;
      V::store(squeezed + s, apply_activation<V>(V::load(squeezed + s, left), a.activation), left);
    }
    sum_rows<true>(a.expand, channels, a.squeezed, squeezed, a.expand_bias, channels, sums);
    for (int64_t c = 0; c < channels; c += V::width)
      V::store(sums + c, gated(V::load(sums + c, channels - c), a.gate), channels - c);
  }

  static void scale(const SqueezeExcite& a, const float* scales, const float* x, int64_t pixels, float* y) {
    for (int64_t p = 0; p < pixels; p++, x += a.channels, y += a.channels)
      for (int64_t c = 0; c < a.channels; c += V::width) {
        const int64_t left = a.channels - c;
        V::store(y + c, V::load(x + c, left) * V::load(scales + c, left), left);
      }
  }

  static void run(const SqueezeExcite& a) {
    with_team(a.threads, [&](const Team& team) {
      const int64_t blocks = a.blocks();
      const auto each_block = [&](const auto& use) {  // use(sums of the image, block, its first number, its pixels)
        int64_t begin, end;
        team.share(a.images * blocks, 1, &begin, &end);
        for (int64_t i = begin; i < end; i++) {
          const int64_t image = i / blocks, first = i % blocks * kSqueezeBlock;
          use(a.workspace + image * a.each(), i % blocks, (image * a.pixels + first) * a.channels,
              least(kSqueezeBlock, a.pixels - first));
        }
      };
      each_block([&](float* sums, int64_t block, int64_t at, int64_t pixels) {
        sum_rows<false>(a.x + at, a.channels, pixels, nullptr, nullptr, a.channels, sums + block * a.channels);
      });
      team.barrier();
      int64_t begin, end;
      team.share(a.images, 1, &begin, &end);
      for (int64_t image = begin; image < end; image++) excite(a, a.workspace + image * a.each());
      team.barrier();
      each_block([&](const float* scales, int64_t, int64_t at, int64_t pixels) {
        scale(a, scales, a.x + at, pixels, a.y + at);
      });
    });
  }
};

}  // namespace
