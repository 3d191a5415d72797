// The sampled product, lanes along the tokens: both sides are transposed a block of tokens at a time, and each kept place is
// a dot product of a row of one with a row of the other. Included once per instruction set; internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "native/compiler.h"
#include "native/integers.h"
#include "native/parallel.h"
#include "nm_sddmm.h"

namespace {

using twofour::NmSddmm;

constexpr int64_t kInputs = 16;  // of a panel
constexpr int kSums = 8;         // kept among them
constexpr int64_t kOutputs = 256;  // rows of the left side that stay in the second cache

// Tokens x columns as columns x `step`; tokens past the last, up to a multiple of a vector, are zero.
template <class V, class X>
TWOFOUR_INLINE void turn(const X* from, int64_t stride, int64_t tokens, int64_t columns, float* to, int64_t step) {
  for (int64_t t = 0; t < tokens; t += V::width)
    for (int64_t c = 0; c < columns; c += V::width) {
      typename V::reg square[V::width];
      const X* corner = from + t * stride + c;
      float* place = to + c * step + t;
      if (tokens - t >= V::width && columns - c >= V::width) {
        TWOFOUR_UNROLL
        for (int i = 0; i < V::width; i++) square[i] = V::load_unaligned(corner + i * stride);
        V::transpose(square);
        TWOFOUR_UNROLL
        for (int i = 0; i < V::width; i++) V::store_aligned(place + i * step, square[i]);
      } else {
        for (int i = 0; i < V::width; i++)
          square[i] = t + i < tokens ? V::load(corner + i * stride, columns - c) : V::zero();
        V::transpose(square);
        for (int64_t i = 0; i < least(V::width, columns - c); i++) V::store_aligned(place + i * step, square[i]);
      }
    }
}
template <class V>
TWOFOUR_INLINE void turn(const NmSddmm& a, bool left, int64_t first, int64_t tokens, int64_t column, int64_t columns,
                         float* to) {
  const int64_t stride = left ? a.left_stride : a.right_stride, at = first * stride + column;
  const void* from = left ? a.left : a.right;
  float* place = to + column * a.step;
  if (a.bf16) turn<V>(static_cast<const uint16_t*>(from) + at, stride, tokens, columns, place, a.step);
  else turn<V>(static_cast<const float*>(from) + at, stride, tokens, columns, place, a.step);
}

// The sums of each of kSums vectors, in order, in as few vectors as hold them: neighbours are added again and again.
template <class V>
TWOFOUR_INLINE void add_up(typename V::reg (&sums)[kSums]) {
  int count = kSums;
  TWOFOUR_UNROLL
  for (int lanes = V::width; lanes > 1; lanes /= 2) {
    if (count == 1) {
      sums[0] = V::evens(sums[0], sums[0]) + V::odds(sums[0], sums[0]);
      continue;
    }
    TWOFOUR_UNROLL
    for (int i = 0; i < count / 2; i++) sums[i] = V::evens(sums[2 * i], sums[2 * i + 1]) + V::odds(sums[2 * i], sums[2 * i + 1]);
    count /= 2;
  }
}

// One row of the left side with what it keeps of a panel of inputs: `codes` has two bits for each kept place.
template <class V>
TWOFOUR_INLINE void multiply(const float* row, const float* panel, int64_t step, unsigned codes, int64_t tokens,
                             typename V::reg (&sums)[kSums]) {
  const float* inputs[kSums];
  TWOFOUR_UNROLL
  for (int k = 0; k < kSums; k++) {
    inputs[k] = panel + (k / 2 * 4 + (codes >> (2 * k) & 3)) * step;
    sums[k] = V::zero();
  }
  for (int64_t t = 0; t < tokens; t += V::width) {
    const typename V::reg left = V::load_shared(row + t);
    TWOFOUR_UNROLL
    for (int k = 0; k < kSums; k++) sums[k] = V::fma(left, inputs[k] + t, sums[k]);
  }
  add_up<V>(sums);
}

template <class V>
TWOFOUR_INLINE void multiply_rows(const NmSddmm& a, bool more, int64_t tokens, const float* inputs, const float* rows,
                                  int64_t begin, int64_t end) {
  const int64_t step = a.step, in = a.in, bytes = ceil_div(in, 8);
  for (int64_t c = 0; c < in; c += kInputs) {
    const int64_t count = least(kInputs, in - c) / 2;
    const uint8_t* at = a.indices + begin * bytes + c / 8;
    float* values = a.values + begin * (in / 2) + c / 2;
    for (int64_t r = begin; r < end; r++, at += bytes, values += in / 2) {
      typename V::reg sums[kSums];
      const unsigned codes = at[0] | (count > 4 ? at[1] << 8 : 0);
      multiply<V>(rows + r * step, inputs + c * step, step, codes, tokens, sums);
      float found[kSums];
      std::memcpy(found, sums, sizeof found);
      for (int64_t k = 0; more && k < count; k++) found[k] += values[k];
      if (count == kSums) std::memcpy(values, found, sizeof found);
      else std::memcpy(values, found, static_cast<size_t>(count) * 4);
    }
  }
}

template <class V>
TWOFOUR_INLINE void sample(const NmSddmm& a) {
  auto* inputs = static_cast<float*>(a.scratch);
  float* rows = inputs + round_up(a.in, 16) * a.step;
  const int64_t each = least(kOutputs, round_up(ceil_div(a.out, a.threads), 16));
  for (int64_t first = 0; first < a.tokens; first += a.block) {
    const int64_t tokens = least(a.block, a.tokens - first);
    twofour::parallel_for(ceil_div(a.in, kInputs), 1, a.threads, [&](int64_t begin, int64_t end) {
      const int64_t column = begin * kInputs;
      turn<V>(a, false, first, tokens, column, least(end * kInputs, a.in) - column, inputs);
    });
    twofour::parallel_for(ceil_div(a.out, each), 1, a.threads, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * each; row < least(end * each, a.out); row += each) {
        const int64_t last = least(row + each, a.out);
        turn<V>(a, true, first, tokens, row, last - row, rows);
        multiply_rows<V>(a, first > 0, tokens, inputs, rows, row, last);
      }
    });
  }
}

}  // namespace
