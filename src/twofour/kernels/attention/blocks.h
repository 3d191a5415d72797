// Attention of one head at a time, everything in the core's own caches: keys transposed and values copied into panels
// once, then for each block of queries the scores, their softmax and the weighted values. Internal linkage.
#pragma once

#include <cstring>

#include "attention.h"
#include "native/vector_exp.h"
#include "native/whole.h"

namespace {

using twofour::Attention;
using twofour::AttentionMask;

// Scores are kept in units of ln 2, so that softmax needs 2^x alone.
constexpr float kLog2E = 1.44269504f;

// `kRows` queries by `kColumns` vectors of keys (or of value columns) are summed in registers.
template <class V, int kRows, int kColumns>
struct Blocks {
  using reg = typename V::reg;
  static constexpr int64_t kWide = int64_t{kColumns} * V::width;

  // Workspace, in floats: panels of keys [keys / kWide][width][kWide], panels of values [value_width / kWide][keys]
  // [kWide], one block of queries [kRows][width], one of scores [kRows][score_stride].
  struct Plan {
    int64_t score_stride, keys, values, queries, scores;
    // The scores' row is lengthened by a cache line, so that rows do not meet in the same cache set.
    explicit Plan(const Attention& a)
        : score_stride(round_up(a.keys, kWide) + 16),
          keys(round_up(round_up(a.keys, kWide) * a.width, 16)),
          values(round_up(a.keys * round_up(a.value_width, kWide), 16)),
          queries(round_up(kRows * a.width, 16)),
          scores(kRows * score_stride) {}
    int64_t bytes() const { return 4 * (keys + values + queries + scores); }
  };

  static void run(const Attention& a, int64_t begin, int64_t end, float* workspace) {
    const Plan plan(a);
    float *keys = workspace, *values = keys + plan.keys, *queries = values + plan.values, *scores = queries + plan.queries;
    for (int64_t item = begin, packed = -1; item < end; ++item) {
      const int64_t batch = item / a.heads, head = item % a.heads, key_head = head / (a.heads / a.key_heads);
      if (const int64_t source = batch * a.key_heads + key_head; source != packed) {
        pack_keys(a, a.k + batch * a.k_strides.batch + key_head * a.k_strides.head, keys);
        pack_values(a, a.v + batch * a.v_strides.batch + key_head * a.v_strides.head, values);
        packed = source;
      }
      const float* q = a.q + batch * a.q_strides.batch + head * a.q_strides.head;
      float* out = a.out + batch * a.out_strides.batch + head * a.out_strides.head;
      for (int64_t row = 0; row < a.queries; row += kRows) {
        const int64_t rows = a.queries - row < kRows ? a.queries - row : kRows;
        const int64_t seen = a.causal && row + rows < a.keys ? row + rows : a.keys;
        pack_queries(a, q + row * a.q_strides.row, rows, queries);
        score(a, plan, queries, keys, seen, scores);
        float weights[kRows];
        for (int r = 0; r < rows; ++r)
          weights[r] = softmax(a, batch, head, row + r, seen, scores + r * plan.score_stride);
        for (int r = static_cast<int>(rows); r < kRows; ++r)  // so that unused rows hold numbers
          std::memset(scores + r * plan.score_stride, 0, sizeof(float) * static_cast<size_t>(seen));
        weigh(a, plan, scores, values, seen, weights, rows, out + row * a.out_strides.row);
      }
    }
  }

  // Writes keys (keys, width) as panels of kWide keys side by side, zeros behind the last one.
  static void pack_keys(const Attention& a, const float* k, float* panels) {
    constexpr int kWidth = V::width;
    for (int64_t key = 0; key < round_up(a.keys, kWide); key += kWidth) {
      float* panel = panels + key / kWide * kWide * a.width + key % kWide;
      const int64_t present = a.keys - key < kWidth ? a.keys - key : kWidth;
      for (int64_t column = 0; column < a.width; column += kWidth) {
        const int64_t columns = a.width - column < kWidth ? a.width - column : kWidth;
        reg t[kWidth];
        for (int i = 0; i < kWidth; ++i)
          t[i] = i < present ? V::load(k + (key + i) * a.k_strides.row + column, columns) : V::zero();
        V::transpose(t);
        for (int i = 0; i < columns; ++i) V::store(panel + (column + i) * kWide, t[i]);
      }
    }
  }

  // Writes values (keys, value_width) as panels of kWide columns, zeros behind the last one.
  static void pack_values(const Attention& a, const float* v, float* panels) {
    for (int64_t column = 0; column < a.value_width; column += kWide, panels += a.keys * kWide)
      for (int64_t key = 0; key < a.keys; ++key)
        for (int64_t c = 0; c < kWide; c += V::width) {
          const int64_t left = a.value_width - column - c;
          const float* from = v + key * a.v_strides.row + column + c;
          const reg found = left >= V::width ? V::load(from) : left > 0 ? V::load(from, left) : V::zero();
          V::store(panels + key * kWide + c, found);
        }
  }

  // Copies a block of queries, scaled, with zeros for the missing rows.
  static void pack_queries(const Attention& a, const float* q, int64_t rows, float* block) {
    const reg scale = V::all(a.scale * kLog2E);
    for (int64_t r = 0; r < kRows; ++r, block += a.width)
      for (int64_t c = 0; c < a.width; c += V::width) {
        const int64_t left = a.width - c < V::width ? a.width - c : V::width;
        const reg found = r < rows ? V::load(q + r * a.q_strides.row + c, left) : V::zero();
        V::store(block + c, V::mul(found, scale), left);
      }
  }

  // sums[r][c] = sum over k of left[r * left_stride + k] * right[k * kWide + c]
  static inline __attribute__((always_inline)) void multiply(const float* left, int64_t left_stride, const float* right,
                                                             int64_t depth, reg (&sums)[kRows][kColumns]) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) sums[r][c] = V::zero();
    for (int64_t k = 0; k < depth; ++k, right += kWide) {
      reg columns[kColumns];
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) columns[c] = V::load_once(right + c * V::width);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const reg value = V::spread_once(left + r * left_stride + k);
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) sums[r][c] = V::fma(value, columns[c], sums[r][c]);
      }
    }
  }

  static void score(const Attention& a, const Plan& plan, const float* queries, const float* keys, int64_t seen,
                    float* scores) {
    for (int64_t key = 0; key < seen; key += kWide) {
      reg sums[kRows][kColumns];
      multiply(queries, a.width, keys + key * a.width, a.width, sums);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) V::store(scores + r * plan.score_stride + key + c * V::width, sums[r][c]);
    }
  }

  // Turns one row of scores into 2^(score - largest); returns one over their sum, or 0 where no key is seen.
  static float softmax(const Attention& a, int64_t batch, int64_t head, int64_t row, int64_t seen, float* scores) {
    if (a.causal && row + 1 < seen) {
      std::memset(scores + row + 1, 0, sizeof(float) * static_cast<size_t>(seen - row - 1));
      seen = row + 1;
    }
    const reg hidden = V::all(-__builtin_inff());
    const int64_t offset = batch * a.mask_strides.batch + head * a.mask_strides.head + row * a.mask_strides.row;
    reg most = hidden, odd = hidden;
    int64_t j = 0;
    if (a.mask_kind == AttentionMask::none)  // two chains: the largest so far is what the next one waits for
      for (; j + 2 * V::width <= seen; j += 2 * V::width) {
        most = V::max(most, V::load(scores + j));
        odd = V::max(odd, V::load(scores + j + V::width));
      }
    most = V::max(most, odd);
    for (; j < seen; j += V::width) {
      const int64_t left = seen - j < V::width ? seen - j : V::width;
      reg s = V::load(scores + j, left);
      if (a.mask_kind == AttentionMask::add) {
        // A finite mask near -FLT_MAX overflows in units of ln 2; the bound is NaN where the mask is infinite, and the
        // second operand of a maximum with NaN is the answer: true infinities stay.
        const reg mask = V::load(static_cast<const float*>(a.mask) + offset + j, left);
        s = V::max(V::fma(mask, V::zero(), V::all(-__FLT_MAX__)), V::fma(mask, V::all(kLog2E), s));
      } else if (a.mask_kind == AttentionMask::keep) {
        s = V::where_byte(static_cast<const uint8_t*>(a.mask) + offset + j, left, s, hidden);
      }
      if (left < V::width) {
        V::store(scores + j, s, left);
        float tail[V::width];
        V::store(tail, s);
        for (int64_t i = 0; i < left; ++i) most = V::max(most, V::all(tail[i]));
      } else {
        if (a.mask_kind != AttentionMask::none) V::store(scores + j, s);
        most = V::max(most, s);
      }
    }
    const float largest = V::largest(most);
    const reg shift = V::all(largest == -__builtin_inff() ? 0.0f : largest);
    reg total = V::zero();
    for (j = 0; j + V::width <= seen; j += V::width) {
      const reg p = exp2_of<V>(V::sub(V::load(scores + j), shift));
      V::store(scores + j, p);
      total = V::add(total, p);
    }
    float sum = V::sum(total);
    if (j < seen) {
      float tail[V::width];
      V::store(tail, exp2_of<V>(V::sub(V::load(scores + j, seen - j), shift)));
      for (int64_t i = 0; j + i < seen; ++i) sum += scores[j + i] = tail[i];
    }
    return sum != 0.0f ? 1.0f / sum : 0.0f;
  }

  static void weigh(const Attention& a, const Plan& plan, const float* scores, const float* values, int64_t seen,
                    const float* weights, int64_t rows, float* out) {
    for (int64_t column = 0; column < a.value_width; column += kWide, values += a.keys * kWide) {
      reg sums[kRows][kColumns];
      multiply(scores, plan.score_stride, values, seen, sums);
      const int64_t left = a.value_width - column;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        if (r >= rows) break;
        float* to = out + r * a.out_strides.row + column;
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) {
          const reg result = V::mul(sums[r][c], V::all(weights[r]));
          const int64_t wanted = left - c * V::width;
          if (wanted >= V::width) {
            V::store(to + c * V::width, result);
          } else if (wanted > 0) {
            V::store(to + c * V::width, result, wanted);
          }
        }
      }
    }
  }
};

}  // namespace
