// The inner product: up to 13 pixels by up to 32 outputs over all inputs of a window, sums in registers.
#pragma once

#include <cstdint>

#include "kernels/epilogue_math.h"
#include "native/compiler.h"
#include "native/integers.h"
#include "plan.h"

namespace {

// What a block is multiplied with.
struct DirectPanel {
  const float *weight, *bias, *other;
  float* y;                       // as `other` at the panel's first output
  int64_t stride, rows, length;   // floats from pixel to pixel of y and `other`; outputs of the panel; floats of a run
  Stream read, written, added;    // what comes next: weights or pixels, and of the answer and what is added to it
  twofour::ConvActivation activation;
};

// `Inputs` inputs from k on of one run. An address is read once for all of them: that takes as long as a multiply-add.
template <class V, int T, int N, int Inputs>
TWOFOUR_INLINE void add_inputs(const float* const* from, int64_t k, const float* weight, typename V::reg (&sums)[T][N]) {
  typename V::reg w[Inputs][N];
  TWOFOUR_UNROLL
  for (int i = 0; i < Inputs; i++) {
    TWOFOUR_UNROLL
    for (int n = 0; n < N; n++) w[i][n] = V::load_shared(weight + i * kConvPanel + n * V::width);
  }
  if constexpr (T > 8) asm("" : "+r"(from));  // else the compiler keeps the addresses in vector registers
  TWOFOUR_UNROLL
  for (int t = 0; t < T; t++) {
    const float* x = from[t] + k;
    TWOFOUR_UNROLL
    for (int i = 0; i < Inputs; i++) {
      const typename V::reg one = V::broadcast_shared(x + i);
      TWOFOUR_UNROLL
      for (int n = 0; n < N; n++) sums[t][n] = V::fma(w[i][n], one, sums[t][n]);
    }
  }
}

// T pixels by N vectors of outputs from `first` on.
template <class V, int T, int N>
TWOFOUR_NOINLINE void direct_sums(const typename DirectPlan<V>::Block& block, const DirectPanel& p, int64_t first) {
  constexpr int inputs = N == 1 ? 4 : V::width == 16 ? 2 : 1;  // of a step: what the registers hold
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
    TWOFOUR_UNROLL
    for (int line = 0; line < N * V::width; line += 16) {  // stores would wait for them
      if (written.step == 0) __builtin_prefetch(y + block.at[t] * p.stride + line, 1);
      if (other != nullptr) __builtin_prefetch(other + block.at[t] * p.stride + line);
    }
  }
  for (int64_t i = 0; i < block.runs; i++) {
    const typename DirectPlan<V>::Run& run = block.run[i];
    const float* weight = p.weight + run.weight + first;
    int64_t k = 0;
    for (; k + inputs <= p.length; k += inputs, weight += inputs * kConvPanel) {
      TWOFOUR_UNROLL
      for (int i = 0; i < inputs; i++) read.fetch(), written.fetch(), added.fetch();
      add_inputs<V, T, N, inputs>(run.from, k, weight, sums);
    }
    for (; k < p.length; k++, weight += kConvPanel) add_inputs<V, T, N, 1>(run.from, k, weight, sums);
  }
  TWOFOUR_UNROLL
  for (int n = 0; n < N; n++) {
    const int64_t left = rows - n * V::width;
    if (left <= 0) break;
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      const int64_t place = block.at[t] * p.stride + n * V::width;
      typename V::reg v = sums[t][n];
      if (other != nullptr) v = v + V::load(other + place, left);
      if (p.activation.relu()) v = FloatMath<V>::at_most(p.activation.most, FloatMath<V>::relu(v));
      V::store(y + place, v, left);
    }
  }
}

template <class V, int T = DirectPlan<V>::most>
void direct_block(const typename DirectPlan<V>::Block& block, const DirectPanel& p) {
  if (block.pixels == T) {
    for (int64_t at = 0; at < p.rows; at += DirectPlan<V>::wide)
      if (p.rows - at > V::width) direct_sums<V, T, 2>(block, p, at);
      else direct_sums<V, T, 1>(block, p, at);
    return;
  }
  if constexpr (T > 1) direct_block<V, T - 1>(block, p);
}

}  // namespace
