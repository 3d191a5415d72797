// One row of scores becomes the weights of its values. Internal linkage.
#pragma once

#include "cells.h"
#include "kernels/rounded_once.h"

namespace {

// Scores are kept in units of ln 2, so that softmax needs 2^x alone.
constexpr float kLog2E = 1.44269504f;

// Adds the mask of one row to `seen` scores, in place, or hides what it hides; returns the largest.
template <class V>
float masked(const Attention& a, int64_t offset, int64_t seen, float* scores) {
  using reg = typename V::reg;
  const reg hidden = V::all(-__builtin_inff());
  reg most = hidden, odd = hidden;
  int64_t j = 0;
  if (a.mask_kind == AttentionMask::none)  // two chains: the largest so far is what the next one waits for
    for (; j + 2 * V::width <= seen; j += 2 * V::width) {
      most = V::max(most, V::load_unaligned(scores + j));
      odd = V::max(odd, V::load_unaligned(scores + j + V::width));
    }
  most = V::max(most, odd);
  for (; j < seen; j += V::width) {
    const int64_t left = least(seen - j, V::width);
    reg s = V::load_partial(scores + j, left);
    if (a.mask_kind == AttentionMask::add) {
      // A finite mask near -FLT_MAX overflows in units of ln 2; the bound is NaN where the mask is infinite, and the
      // second operand of a maximum with NaN is the answer: true infinities stay. Rounded once, since int8 has the same
      // bits in every set, but for what rounded_once.h says of sets without such an instruction.
      const reg mask = V::load_partial(static_cast<const float*>(a.mask) + offset + j, left);
      s = V::max(V::fma(mask, V::zero(), V::all(-__FLT_MAX__)), rounded_once<V>(mask, V::all(kLog2E), s));
    } else if (a.mask_kind == AttentionMask::keep) {
      s = V::where_byte(static_cast<const uint8_t*>(a.mask) + offset + j, left, s, hidden);
    }
    if (left < V::width) {
      V::store_partial(scores + j, s, left);
      float tail[V::width];
      V::store_unaligned(tail, s);
      for (int64_t i = 0; i < left; ++i) most = V::max(most, V::all(tail[i]));
    } else {
      if (a.mask_kind != AttentionMask::none) V::store_unaligned(scores + j, s);
      most = V::max(most, s);
    }
  }
  return V::largest(most);
}

// Turns one row of scores, those of keys [begin, end), into 2^(score - largest) as cells of C, zeros where only other rows of
// the block see a key; returns one over their sum, or `unseen` where no key is seen.
template <class C>
float softmax(const Attention& a, int64_t batch, int64_t head, int64_t row, int64_t begin, int64_t end, float* scores) {
  using V = typename C::V;
  using reg = typename V::reg;
  const int64_t seen = end - begin, own = a.causal && row < end ? (row < begin ? 0 : row + 1 - begin) : seen;
  const float largest = masked<V>(a, a.mask_at(batch, head, row) + begin, own, scores);
  const reg shift = V::all(largest == -__builtin_inff() ? 0.0f : largest);
  reg total = V::zero();
  int64_t j = 0;
  for (; j + V::width <= own; j += V::width) {
    const reg p = C::exp2(V::load_unaligned(scores + j) - shift);
    C::store_weights(scores, j, p, V::width);
    total = total + p;
  }
  float sum = V::sum(total);
  if (j < own) {
    const reg p = C::exp2(V::load_partial(scores + j, own - j) - shift);
    float tail[V::width];
    V::store_unaligned(tail, p);
    for (int64_t i = 0; j + i < own; ++i) sum += tail[i];
    C::store_weights(scores, j, p, own - j);
  }
  C::clear_weights(scores, own, round_up(seen, C::step));
  return sum != 0.0f ? 1.0f / sum : a.unseen;
}

// The same for R rows of scores beside each other, `stride` apart, that see all of `seen` keys and have no mask: the latencies
// of a row's largest, its sum and its division overlap. Rows have room for whole vectors.
template <class C, int R>
void softmax_beside(int64_t seen, int64_t stride, float unseen, float* scores, float* weights) {
  using V = typename C::V;
  using reg = typename V::reg;
  const int64_t whole = round_up(seen, V::width);
  reg most[R], total[R];
  TWOFOUR_UNROLL
  for (int r = 0; r < R; ++r) {
    most[r] = V::all(-__builtin_inff()), total[r] = V::zero();
    for (int64_t j = seen; j < whole; ++j) scores[r * stride + j] = -__builtin_inff();
  }
  for (int64_t j = 0; j < whole; j += V::width) {
    TWOFOUR_UNROLL
    for (int r = 0; r < R; ++r) most[r] = V::max(most[r], V::load_unaligned(scores + r * stride + j));
  }
  TWOFOUR_UNROLL
  for (int r = 0; r < R; ++r) {
    const float largest = V::largest(most[r]);
    most[r] = V::all(largest == -__builtin_inff() ? 0.0f : largest);
  }
  for (int64_t j = 0; j < whole; j += V::width) {
    TWOFOUR_UNROLL
    for (int r = 0; r < R; ++r) {
      const reg p = C::exp2(V::load_unaligned(scores + r * stride + j) - most[r]);
      C::store_weights(scores + r * stride, j, p, V::width);
      total[r] = total[r] + p;
    }
  }
  TWOFOUR_UNROLL
  for (int r = 0; r < R; ++r) {
    const float sum = V::sum(total[r]);
    weights[r] = sum != 0.0f ? 1.0f / sum : unseen;
  }
}

}  // namespace
