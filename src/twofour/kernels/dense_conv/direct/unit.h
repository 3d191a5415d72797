// The inner product: up to 14 pixels by up to 32 outputs over all inputs of a window, sums in registers. Where its pixels are
// read and stored a block says: one of a table of addresses (plan.h), or of lines of the image (lines.h).
#pragma once

#include <cstdint>

#include "kernels/epilogue_math.h"
#include "native/compiler.h"
#include "native/integers.h"
#include "plan.h"

namespace {

// What a block is multiplied with.
struct DirectPanel {
  const float* weight;
  int64_t length;                    // floats of a run
  Stream read{}, written{}, added{};  // what comes next: weights or pixels, and of the answer and what is added to it
  const float *bias = nullptr, *other = nullptr;
  float* y = nullptr;                // as `other` at the panel's first output
  int64_t stride = 0, rows = 0;      // floats from pixel to pixel of y and `other`; outputs of the panel
  twofour::ConvActivation activation{};
};

// `Inputs` inputs from k on of one run. An address is read once for all of them: that takes as long as a multiply-add.
template <class V, int T, int N, int Inputs, class Window>
TWOFOUR_INLINE void add_inputs(const Window& window, int64_t k, const float* weight, typename V::reg (&sums)[T][N]) {
  typename V::reg w[Inputs][N];
  TWOFOUR_UNROLL
  for (int i = 0; i < Inputs; i++) {
    TWOFOUR_UNROLL
    for (int n = 0; n < N; n++) w[i][n] = V::load_shared(weight + i * kConvPanel + n * V::width);
  }
  const Window* from = &window;
  if constexpr (Window::table && T > 8) asm("" : "+r"(from));  // else the compiler keeps the addresses in vector registers
  TWOFOUR_UNROLL
  for (int t = 0; t < T; t++) {
    TWOFOUR_UNROLL
    for (int i = 0; i < Inputs; i++) {
      const typename V::reg one = V::broadcast_shared(from->input(t, k + i));
      TWOFOUR_UNROLL
      for (int n = 0; n < N; n++) sums[t][n] = V::fma(w[i][n], one, sums[t][n]);
    }
  }
}

// The lines of the answer, or of what is added to it, that T pixels by N vectors of outputs touch.
template <class V, int T, int N, bool written, class Block>
TWOFOUR_INLINE void fetch_lines(const Block& block, const float* from, int64_t stride) {
  TWOFOUR_UNROLL
  for (int t = 0; t < T; t++) {
    TWOFOUR_UNROLL
    for (int line = 0; line < N * V::width; line += 16) __builtin_prefetch(from + block.pixel(t) * stride + line, written);
  }
}

// The sums of T pixels for `count` outputs, vector n of each: a branch for all of them is one that costs nothing.
template <class V, int T, int N, bool whole, class Block>
TWOFOUR_INLINE void store_sums(const Block& block, const DirectPanel& p, typename V::reg (&sums)[T][N], int n, float* y,
                               const float* other, int64_t count) {
  if (other != nullptr) {
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      const float* from = other + block.pixel(t) * p.stride;
      sums[t][n] = sums[t][n] + (whole ? V::load_unaligned(from) : V::load_partial(from, count));
    }
  }
  if (p.activation.relu()) {
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) sums[t][n] = FloatMath<V>::at_most(p.activation.most, FloatMath<V>::relu(sums[t][n]));
  }
  TWOFOUR_UNROLL
  for (int t = 0; t < T; t++) {
    float* to = y + block.pixel(t) * p.stride;
    if (whole) V::store_unaligned(to, sums[t][n]);
    else V::store_partial(to, sums[t][n], count);
  }
}

// T pixels by N vectors of outputs from `first` on.
template <class V, int T, int N, class Block>
TWOFOUR_NOINLINE void direct_sums(const Block& block, const DirectPanel& p, int64_t first) {
  constexpr int inputs = N == 1 ? 4 : V::width == 16 && T < 14 ? 2 : 1;  // of a step: what the registers hold
  const int64_t rows = p.rows - first;
  Stream read = p.read, written = p.written, added = p.added;
  float* y = p.y + first;
  const float* other = p.other == nullptr ? nullptr : p.other + first;
  typename V::reg sums[T][N], bias[N];
  TWOFOUR_UNROLL
  for (int n = 0; n < N; n++)
    bias[n] = p.bias == nullptr ? V::zero() : V::load(p.bias + first + n * V::width, rows - n * V::width);
  TWOFOUR_UNROLL
  for (int t = 0; t < T; t++) {
    TWOFOUR_UNROLL
    for (int n = 0; n < N; n++) sums[t][n] = bias[n];
  }
  if (written.step == 0) fetch_lines<V, T, N, true>(block, y, p.stride);  // stores would wait for them
  if (other != nullptr) fetch_lines<V, T, N, false>(block, other, p.stride);
  for (int64_t i = 0; i < block.runs; i++) {
    const auto& window = block.window(i);
    const float* weight = p.weight + window.weight + first;
    int64_t k = 0;
    for (; k + inputs <= p.length; k += inputs, weight += inputs * kConvPanel) {
      TWOFOUR_UNROLL
      for (int i = 0; i < inputs; i++) read.fetch(), written.fetch(), added.fetch();
      add_inputs<V, T, N, inputs>(window, k, weight, sums);
    }
    for (; k < p.length; k++, weight += kConvPanel) add_inputs<V, T, N, 1>(window, k, weight, sums);
  }
  TWOFOUR_UNROLL
  for (int n = 0; n < N; n++) {
    const int64_t left = rows - n * V::width;
    const float* const added_to = other == nullptr ? nullptr : other + n * V::width;
    if (left >= V::width) store_sums<V, T, N, true>(block, p, sums, n, y + n * V::width, added_to, V::width);
    else if (left > 0) store_sums<V, T, N, false>(block, p, sums, n, y + n * V::width, added_to, left);
  }
}

template <class V, class Block, int T = Block::most>
void direct_block(const Block& block, const DirectPanel& p) {
  if (block.pixels == T) {
    for (int64_t at = 0; at < p.rows; at += DirectPlan<V>::wide)
      if (p.rows - at > V::width) direct_sums<V, T, 2>(block, p, at);
      else direct_sums<V, T, 1>(block, p, at);
    return;
  }
  if constexpr (T > 1) direct_block<V, Block, T - 1>(block, p);
}

// A block by panel `panel` of a group, and what follows while the sums are in the cache. `image`: of the answer.
template <class V, class Block>
void multiply_block(const DenseConv& a, const Block& block, int64_t group, int64_t panel, int64_t image, DirectPanel p) {
  const int64_t outputs = a.out_channels / a.groups, output = group * outputs + panel * kConvPanel;
  const int64_t at = image * a.height.output * a.width.output * a.out_channels + output;
  p.bias = a.bias ? a.bias + output : nullptr;
  p.other = a.other ? a.other + at : nullptr;
  p.y = a.y + at, p.stride = a.out_channels, p.rows = least(kConvPanel, outputs - panel * kConvPanel);
  p.activation = a.activation;
  direct_block<V>(block, p);
  if (!a.activation.passes()) return;
  const Epilogue epilogue{a.activation.kind, twofour::Combine::none, nullptr, 0};
  const int64_t first = block.pixel(0), in_a_row = block.pixel(block.pixels - 1) - first == block.pixels - 1 ? block.pixels : 1;
  for (int64_t t = 0; t < block.pixels; t += in_a_row)
    finish_rows<V>(epilogue, p.y, p.stride, block.pixel(t), in_a_row, 0, p.rows);
}

}  // namespace
