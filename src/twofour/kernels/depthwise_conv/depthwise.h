// y = activation(conv(x, W) + bias), a filter of its own for each channel, channels last.
//
// A vector holds neighbouring channels of one pixel. Up to kPixels outputs of a row are summed at once. For rows of 3, 5 and 7
// taps at stride 1, and 3 and 5 at stride 2, a pixel is loaded once for all of them. For others a tap is one load of its
// weights and one of each pixel; where such taps fall outside the image, outputs are summed one by one, several vectors of
// channels at once, over the taps that are inside.
#pragma once

#include "depthwise_conv.h"
#include "kernels/epilogue_math.h"
#include "native/integers.h"
#include "native/parallel.h"
#include "native/simd.h"

namespace {

using twofour::ConvAxis;
using twofour::Depthwise;

template <class V>
struct DepthwiseRows {
  using F = typename V::reg;
  static constexpr int kPixels = V::width == 16 ? 8 : 4, kVectors = 4;

  // Taps [first, last) of an axis that meet the image at output `at`.
  struct Taps {
    int64_t first, last, start;  // start: the pixel that the first of them reads
    Taps(const ConvAxis& axis, int64_t at) {
      const int64_t origin = at * axis.stride - axis.padding;
      first = origin < 0 ? ceil_div(-origin, axis.dilation) : 0;
      last = origin >= axis.input ? 0 : least(axis.taps, ceil_div(axis.input - origin, axis.dilation));
      if (first >= last) first = last = 0;
      start = last == 0 ? 0 : origin + first * axis.dilation;
    }
  };

  // A sum on its way out, behind a ReLU if that follows.
  static TWOFOUR_INLINE F bounded(const Depthwise& a, F sum) {
    return a.activation.relu() ? FloatMath<V>::at_most(a.activation.most, FloatMath<V>::relu(sum)) : sum;
  }

  // Sums of N outputs `step` floats apart, of `channels` channels (a vector, or fewer), in registers, then stored.
  template <int N>
  static TWOFOUR_INLINE void pixels(const Depthwise& a, const float* x, const Taps& high, const Taps& wide,
                                    int64_t channel, int64_t channels, float* y) {
    const int64_t c = a.channels, row = a.width.input * c * a.height.dilation, column = c * a.width.dilation;
    const int64_t step = c * a.width.stride;
    F sum[N];
    const F bias = a.bias ? V::load(a.bias + channel, channels) : V::zero();
    TWOFOUR_UNROLL
    for (int n = 0; n < N; n++) sum[n] = bias;
    for (int64_t kh = high.first; kh < high.last; kh++, x += row) {
      const float* at = x;
      const float* w = a.weight + (kh * a.width.taps + wide.first) * c + channel;
      for (int64_t kw = wide.first; kw < wide.last; kw++, at += column, w += c) {
        const F weight = V::load(w, channels);
        TWOFOUR_UNROLL
        for (int n = 0; n < N; n++) sum[n] = V::fma(weight, V::load(at + n * step, channels), sum[n]);
      }
    }
    TWOFOUR_UNROLL
    for (int n = 0; n < N; n++) V::store(y + n * c, bounded(a, sum[n]), channels);
  }
  // One output, N whole vectors of channels.
  template <int N>
  static TWOFOUR_INLINE void vectors(const Depthwise& a, const float* x, const Taps& high, const Taps& wide,
                                     int64_t channel, float* y) {
    const int64_t c = a.channels, row = a.width.input * c * a.height.dilation, column = c * a.width.dilation;
    F sum[N];
    TWOFOUR_UNROLL
    for (int n = 0; n < N; n++) sum[n] = a.bias ? V::load_unaligned(a.bias + channel + n * V::width) : V::zero();
    for (int64_t kh = high.first; kh < high.last; kh++, x += row) {
      const float* at = x;
      const float* w = a.weight + (kh * a.width.taps + wide.first) * c + channel;
      for (int64_t kw = wide.first; kw < wide.last; kw++, at += column, w += c) {
        TWOFOUR_UNROLL
        for (int n = 0; n < N; n++)
          sum[n] = V::fma(V::load_unaligned(w + n * V::width), V::load_unaligned(at + n * V::width), sum[n]);
      }
    }
    TWOFOUR_UNROLL
    for (int n = 0; n < N; n++) V::store_unaligned(y + n * V::width, bounded(a, sum[n]));
  }

  // Output `column` of a row, all channels.
  static TWOFOUR_NOINLINE void border(const Depthwise& a, const float* image, const Taps& high, int64_t column, float* y) {
    const Taps wide(a.width, column);
    const float* x = image + (high.start * a.width.input + wide.start) * a.channels;
    int64_t channel = 0;
    for (; channel + kVectors * V::width <= a.channels; channel += kVectors * V::width)
      vectors<kVectors>(a, x + channel, high, wide, channel, y + column * a.channels + channel);
    for (; channel + V::width <= a.channels; channel += V::width)
      vectors<1>(a, x + channel, high, wide, channel, y + column * a.channels + channel);
    if (channel < a.channels)
      pixels<1>(a, x + channel, high, wide, channel, a.channels - channel, y + column * a.channels + channel);
  }

  // Outputs [begin, end) of a row, all of whose taps are inside the image's width.
  static TWOFOUR_NOINLINE void inside(const Depthwise& a, const float* image, const Taps& high, int64_t begin, int64_t end,
                                      float* y) {
    const Taps wide(a.width, begin);
    const float* row = image + (high.start * a.width.input + wide.start) * a.channels;
    for (int64_t channel = 0; channel < a.channels; channel += V::width) {
      const int64_t channels = least(V::width, a.channels - channel);
      const float* x = row + channel;
      int64_t at = begin;
      if (channels == V::width)
        for (; at + kPixels <= end; at += kPixels, x += kPixels * a.channels * a.width.stride)
          pixels<kPixels>(a, x, high, wide, channel, V::width, y + at * a.channels + channel);
      for (; at < end; at++, x += a.channels * a.width.stride)
        pixels<1>(a, x, high, wide, channel, channels, y + at * a.channels + channel);
    }
  }

  // N outputs of a row, all channels: a pixel is loaded once for all taps that meet it. `row`: the first pixel of the first
  // row that is met; `origin`: the pixel that the first tap of the first output reads, which may be outside.
  template <int kTaps, int kStride, int N>
  static TWOFOUR_NOINLINE void window(const Depthwise& a, const float* row, const Taps& high, int64_t origin, float* y) {
    const int64_t c = a.channels, down = a.width.input * c * a.height.dilation, end = a.width.input - origin;
    for (int64_t channel = 0; channel + V::width <= c; channel += V::width) {
      F sum[N];
      const F bias = a.bias ? V::load_unaligned(a.bias + channel) : V::zero();
      TWOFOUR_UNROLL
      for (int n = 0; n < N; n++) sum[n] = bias;
      const float* x = row + channel;
      const float* w = a.weight + high.first * kTaps * c + channel;
      for (int64_t kh = high.first; kh < high.last; kh++, x += down, w += kTaps * c) {
        F weight[kTaps];
        TWOFOUR_UNROLL
        for (int j = 0; j < kTaps; j++) weight[j] = V::load_unaligned(w + j * c);
        TWOFOUR_UNROLL
        for (int p = 0; p < (N - 1) * kStride + kTaps; p++) {
          if (p < -origin || p >= end) continue;
          const F one = V::load_unaligned(x + (origin + p) * c);
          TWOFOUR_UNROLL
          for (int j = 0; j < kTaps; j++)
            if (p >= j && (p - j) % kStride == 0 && (p - j) / kStride < N)
              sum[(p - j) / kStride] = V::fma(weight[j], one, sum[(p - j) / kStride]);
        }
      }
      TWOFOUR_UNROLL
      for (int n = 0; n < N; n++) V::store_unaligned(y + n * c + channel, bounded(a, sum[n]));
    }
  }

  // Outputs [at, at + count) of a row, then what follows while they are in the cache.
  template <int kTaps, int kStride, int N = kPixels>
  static void windows(const Depthwise& a, const float* row, const Taps& high, int64_t at, int64_t count, float* y) {
    if (count != N) {
      if constexpr (N > 1) windows<kTaps, kStride, N - 1>(a, row, high, at, count, y);
      return;
    }
    window<kTaps, kStride, N>(a, row, high, at * kStride - a.width.padding, y + at * a.channels);
    const int64_t done = a.channels / V::width * V::width;
    for (int64_t n = at; done < a.channels && n < at + N; n++) {
      const Taps wide(a.width, n);
      pixels<1>(a, row + wide.start * a.channels + done, high, wide, done, a.channels - done, y + n * a.channels + done);
    }
    if (a.activation.passes())
      finish_rows<V>({a.activation.kind, twofour::Combine::none, nullptr, 0}, y, 0, 0, 1, at * a.channels, N * a.channels);
  }
  template <int kTaps, int kStride>
  static void windows_of_rows(const Depthwise& a, int64_t begin, int64_t end) {
    const ConvAxis& w = a.width;
    const int64_t groups = ceil_div(w.output, kPixels), size = w.output / groups, larger = w.output % groups;
    for (int64_t r = begin; r < end; r++) {
      const Taps high(a.height, r % a.height.output);
      const float* row = a.x + (r / a.height.output * a.height.input + high.start) * w.input * a.channels;
      for (int64_t g = 0, at = 0; g < groups; g++) {
        const int64_t count = size + (g < larger ? 1 : 0);
        windows<kTaps, kStride>(a, row, high, at, count, a.y + r * w.output * a.channels);
        at += count;
      }
    }
  }

  // Rows of outputs [begin, end), counted over all images.
  static void run(const Depthwise& a, int64_t begin, int64_t end) {
    const int64_t kind = a.width.dilation == 1 ? a.width.stride * 8 + a.width.taps : 0;
    switch (a.width.taps < 8 ? kind : 0) {
      case 8 + 3: return windows_of_rows<3, 1>(a, begin, end);
      case 8 + 5: return windows_of_rows<5, 1>(a, begin, end);
      case 8 + 7: return windows_of_rows<7, 1>(a, begin, end);
      case 16 + 3: return windows_of_rows<3, 2>(a, begin, end);
      case 16 + 5: return windows_of_rows<5, 2>(a, begin, end);
      default: return rows(a, begin, end);
    }
  }
  // The same for any taps.
  static void rows(const Depthwise& a, int64_t begin, int64_t end) {
    const ConvAxis& w = a.width;
    const int64_t reach = w.dilation * (w.taps - 1);
    const int64_t left = least(ceil_div(w.padding, w.stride), w.output);
    const int64_t last = w.input - 1 - reach + w.padding;  // of the padded width, where a whole window starts last
    const int64_t right = last < 0 ? left : least(w.output, last / w.stride + 1);
    for (int64_t r = begin; r < end; r++) {
      const float* image = a.x + r / a.height.output * a.height.input * w.input * a.channels;
      float* y = a.y + r * w.output * a.channels;
      const Taps high(a.height, r % a.height.output);
      for (int64_t column = 0; column < left; column++) border(a, image, high, column, y);
      if (left < right) inside(a, image, high, left, right, y);
      for (int64_t column = left < right ? right : left; column < w.output; column++) border(a, image, high, column, y);
      if (a.activation.passes())
        finish_rows<V>({a.activation.kind, twofour::Combine::none, nullptr, 0}, y, 0, 0, 1, 0, w.output * a.channels);
    }
  }
};

}  // namespace
