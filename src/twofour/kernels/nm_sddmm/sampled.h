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

// A token in each lane, in float32.
template <class V, class X>
struct Singles {
  using Number = X;
  static constexpr int64_t kPerLane = 1;
  static TWOFOUR_INLINE typename V::reg load(const X* p, int64_t, int64_t count) { return V::load(p, count); }
  static TWOFOUR_INLINE typename V::reg fma(typename V::reg left, const float* right, typename V::reg sum) {
    return V::fma(left, right, sum);
  }
};

// Tokens x columns as columns x `step` lanes; tokens past the last, up to a multiple of a vector, are zero.
template <class V, class Kind>
TWOFOUR_INLINE void turn(const typename Kind::Number* from, int64_t stride, int64_t tokens, int64_t columns, float* to,
                         int64_t step) {
  constexpr int64_t per = Kind::kPerLane;
  for (int64_t t = 0; t < tokens; t += V::width * per)
    for (int64_t c = 0; c < columns; c += V::width) {
      typename V::reg square[V::width];
      const auto* corner = from + t * stride + c;
      float* place = to + c * step + t / per;
      if (tokens - t >= V::width * per && columns - c >= V::width) {
        TWOFOUR_UNROLL
        for (int i = 0; i < V::width; i++) square[i] = Kind::load(corner + i * per * stride, stride, V::width);
        V::transpose(square);
        TWOFOUR_UNROLL
        for (int i = 0; i < V::width; i++) V::store_aligned(place + i * step, square[i]);
      } else {
        for (int i = 0; i < V::width; i++) {
          const int64_t left = tokens - t - i * per;  // a last token without a pair stands beside zeros
          square[i] = left <= 0 ? V::zero() : Kind::load(corner + i * per * stride, left < per ? 0 : stride, columns - c);
        }
        V::transpose(square);
        for (int64_t i = 0; i < least(V::width, columns - c); i++) V::store_aligned(place + i * step, square[i]);
      }
    }
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
template <class V, class Kind>
TWOFOUR_INLINE void multiply(const float* row, const float* panel, int64_t step, unsigned codes, int64_t lanes,
                             typename V::reg (&sums)[kSums]) {
  const float* inputs[kSums];
  TWOFOUR_UNROLL
  for (int k = 0; k < kSums; k++) {
    inputs[k] = panel + (k / 2 * 4 + (codes >> (2 * k) & 3)) * step;
    sums[k] = V::zero();
  }
  for (int64_t t = 0; t < lanes; t += V::width) {
    const typename V::reg left = V::load_shared(row + t);
    TWOFOUR_UNROLL
    for (int k = 0; k < kSums; k++) sums[k] = Kind::fma(left, inputs[k] + t, sums[k]);
  }
  add_up<V>(sums);
}

template <class V, class Kind>
TWOFOUR_INLINE void multiply_rows(const NmSddmm& a, bool more, int64_t lanes, const float* inputs, const float* rows,
                                  int64_t begin, int64_t end) {
  const int64_t step = a.step, in = a.in, bytes = ceil_div(in, 8);
  for (int64_t c = 0; c < in; c += kInputs) {
    const int64_t count = least(kInputs, in - c) / 2;
    const uint8_t* at = a.indices + begin * bytes + c / 8;
    float* values = a.values + begin * (in / 2) + c / 2;
    for (int64_t r = begin; r < end; r++, at += bytes, values += in / 2) {
      typename V::reg sums[kSums];
      const unsigned codes = at[0] | (count > 4 ? at[1] << 8 : 0);
      multiply<V, Kind>(rows + r * step, inputs + c * step, step, codes, lanes, sums);
      float found[kSums];
      std::memcpy(found, sums, sizeof found);
      for (int64_t k = 0; more && k < count; k++) found[k] += values[k];
      if (count == kSums) std::memcpy(values, found, sizeof found);
      else std::memcpy(values, found, static_cast<size_t>(count) * 4);
    }
  }
}

template <class V, class Kind>
TWOFOUR_INLINE void sample(const NmSddmm& a) {
  using X = typename Kind::Number;
  const auto *left = static_cast<const X*>(a.left), *right = static_cast<const X*>(a.right);
  auto* inputs = static_cast<float*>(a.scratch);
  float* rows = inputs + round_up(a.in, 16) * a.step;
  const int64_t each = least(kOutputs, round_up(ceil_div(a.out, a.threads), 16));
  for (int64_t first = 0; first < a.tokens; first += a.block) {
    const int64_t tokens = least(a.block, a.tokens - first), lanes = ceil_div(tokens, Kind::kPerLane);
    twofour::parallel_for(ceil_div(a.in, kInputs), 1, a.threads, [&](int64_t begin, int64_t end) {
      const int64_t c = begin * kInputs;
      turn<V, Kind>(right + first * a.right_stride + c, a.right_stride, tokens, least(end * kInputs, a.in) - c,
                    inputs + c * a.step, a.step);
    });
    twofour::parallel_for(ceil_div(a.out, each), 1, a.threads, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * each; row < least(end * each, a.out); row += each) {
        const int64_t last = least(row + each, a.out);
        turn<V, Kind>(left + first * a.left_stride + row, a.left_stride, tokens, last - row, rows + row * a.step, a.step);
        multiply_rows<V, Kind>(a, first > 0, lanes, inputs, rows, row, last);
      }
    });
  }
}

}  // namespace
