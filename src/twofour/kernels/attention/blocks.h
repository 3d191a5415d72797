// Attention of one head at a time, everything in the core's own caches: keys transposed and values copied into panels
// once, then for each block of queries the scores, their softmax and the weighted values. Internal linkage.
#pragma once

#include <cstring>

#include "answers.h"
#include "dropout.h"
#include "seen_keys.h"
#include "softmax.h"

namespace {

// `kRows` queries by `kColumns` vectors of keys (or of value columns) are summed in registers. `C`: the panels' cells.
template <class C, int kRows, int kColumns>
struct Blocks {
  using V = typename C::V;
  using E = typename C::Element;
  using reg = typename V::reg;
  static constexpr int64_t kWide = int64_t{kColumns} * V::width;
  static constexpr int kBeside = kRows % 3 == 0 ? 3 : kRows % 2 == 0 ? 2 : 1;  // rows whose softmax goes side by side

  // Workspace, in cells: panels of keys [keys / kWide][width / step][kWide], panels of values [value_width / kWide]
  // [keys / step][kWide], one block of queries [kRows][width / step], one of scores [kRows][score_stride].
  struct Plan {
    int64_t width, depth, score_stride, keys, values, queries, scores;
    // The scores' row is lengthened by a cache line, so that rows do not meet in the same cache set.
    explicit Plan(const Attention& a)
        : width(ceil_div(a.width, C::step)),
          depth(ceil_div(a.keys, C::step)),
          score_stride(round_up(a.keys, kWide) + 16),
          keys(round_up(round_up(a.keys, kWide) * width, 16)),
          values(round_up(depth * round_up(a.value_width, kWide), 16)),
          queries(round_up(kRows * width, 16)),
          scores(kRows * score_stride) {}
    int64_t bytes() const { return 4 * (keys + values + queries + scores); }
  };

  static void run(const Attention& a, int64_t begin, int64_t end, float* workspace) {
    const Plan plan(a);
    float *keys = workspace, *values = keys + plan.keys;
    float *queries = values + plan.values, *scores = queries + plan.queries;
    for (int64_t item = begin, packed = -1; item < end; ++item) {
      const int64_t batch = item / a.heads, head = item % a.heads, key_head = head / (a.heads / a.key_heads);
      if (const int64_t source = batch * a.key_heads + key_head; source != packed) {
        pack_keys(a, plan, a.template key_rows<E>(batch, key_head), keys);
        pack_values(a, plan, a.template value_rows<E>(batch, key_head), values);
        packed = source;
      }
      const HeadRows<const E> q = a.template query_rows<E>(batch, head);
      const HeadAnswers<C> out(a, batch, head);
      for (int64_t row = 0; row < a.queries; row += kRows) {
        const int64_t rows = least(a.queries - row, kRows);
        const SeenKeys seen = seen_keys(a, batch, head, row, rows, kWide);
        pack_queries(a, plan, q, row, rows, queries);
        score(a, plan, queries, keys, seen, scores);
        float weights[kRows];
        if (seen.all) {
          for (int r = 0; r < kRows; r += kBeside)
            softmax_beside<C, kBeside>(seen.count(), plan.score_stride, a.unseen, scores + r * plan.score_stride, weights + r);
        } else {
          for (int r = 0; r < rows; ++r)
            weights[r] = softmax<C>(a, batch, head, row + r, seen.begin, seen.end, scores + r * plan.score_stride);
          for (int r = static_cast<int>(rows); r < kRows; ++r)  // so that unused rows hold numbers
            std::memset(scores + r * plan.score_stride, 0, sizeof(float) * static_cast<size_t>(seen.count()));
        }
        if (a.drop_below != 0)
          for (int r = 0; r < rows; ++r) {
            drop<C>(a, batch, head, row + r, seen.end, 1.0f, scores + r * plan.score_stride);
            weights[r] *= a.kept_factor();
          }
        weigh(a, plan, scores, values, seen, weights, out, row, rows);
      }
    }
  }

  // Writes keys (keys, width) as panels of kWide keys side by side, zeros behind the last one.
  static void pack_keys(const Attention& a, const Plan& plan, const Parts<E>& k, float* panels) {
    constexpr int kWidth = V::width;
    for (int64_t key = 0; key < round_up(a.keys, kWide); key += kWidth) {
      float* panel = panels + key / kWide * kWide * plan.width + key % kWide;
      const int64_t present = least(a.keys - key, kWidth);
      for (int64_t cell = 0; cell < plan.width; cell += kWidth) {
        const int64_t cells = least(plan.width - cell, kWidth);
        const int64_t numbers = least(a.width - cell * C::step, kWidth * C::step);
        reg t[kWidth];
        for (int i = 0; i < kWidth; ++i)
          t[i] = i < present ? C::load(k.at(key + i) + cell * C::step, numbers) : V::zero();
        V::transpose(t);
        for (int i = 0; i < cells; ++i) V::store_unaligned(panel + (cell + i) * kWide, t[i]);
      }
    }
  }

  // Writes values (keys, value_width) as panels of kWide columns, zeros behind the last one and below the last key.
  static void pack_values(const Attention& a, const Plan& plan, const Parts<E>& v, float* panels) {
    for (int64_t column = 0; column < a.value_width; column += kWide, panels += plan.depth * kWide)
      for (int64_t cell = 0; cell < plan.depth; ++cell) {
        const int64_t key = cell * C::step;
        const E* row = v.at(key) + column;
        const E* next = key + 1 < a.keys ? v.at(key + 1) + column : nullptr;
        for (int64_t c = 0; c < kWide; c += V::width) {
          const int64_t left = least(a.value_width - column - c, V::width);
          const reg found = left > 0 ? C::load_column(row + c, next ? next + c : nullptr, left) : V::zero();
          V::store_unaligned(panels + cell * kWide + c, found);
        }
      }
  }

  // Copies a block of queries, scaled where cells are floats, with zeros for the missing rows.
  static void pack_queries(const Attention& a, const Plan& plan, const HeadRows<const E>& q, int64_t first, int64_t rows,
                           float* block) {
    const reg scale = V::all(a.scale * kLog2E);
    for (int64_t r = 0; r < kRows; ++r, block += plan.width)
      for (int64_t cell = 0; cell < plan.width; cell += V::width) {
        const int64_t numbers = least(a.width - cell * C::step, V::width * C::step);
        reg found = r < rows ? C::load(q.at(first + r) + cell * C::step, numbers) : V::zero();
        if (C::scaled_queries) found = found * scale;
        V::store_partial(block + cell, found, least(plan.width - cell, V::width));
      }
  }

  // sums[r][c] = sum over cells k of left[r * left_stride + k] * right[k * kWide + c], of the first N vectors of columns.
  template <int N>
  static inline __attribute__((always_inline)) void multiply(const float* left, int64_t left_stride, const float* right,
                                                             int64_t depth, reg (&sums)[kRows][N]) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < N; ++c) sums[r][c] = V::zero();
    for (int64_t k = 0; k < depth; ++k, right += kWide) {
      reg columns[N];
#pragma GCC unroll 4
      for (int c = 0; c < N; ++c) columns[c] = V::load_shared(right + c * V::width);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const reg value = V::broadcast_shared(left + r * left_stride + k);
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) sums[r][c] = C::multiply_add(value, columns[c], sums[r][c]);
      }
    }
  }

  static void score(const Attention& a, const Plan& plan, const float* queries, const float* keys, const SeenKeys& seen,
                    float* scores) {
    for (int64_t key = seen.begin; key < seen.end; key += kWide)
      score_panel(a, plan, queries, keys + key * plan.width, ceil_div(seen.end - key, V::width), scores + key - seen.begin);
  }

  // Scores of a panel's first `vectors` vectors of keys, all where they are more: 197 keys are 13, not 16.
  template <int N = kColumns>
  static void score_panel(const Attention& a, const Plan& plan, const float* queries, const float* keys, int64_t vectors,
                          float* scores) {
    if constexpr (N > 1)
      if (vectors < N) return score_panel<N - 1>(a, plan, queries, keys, vectors, scores);
    const reg scale = V::all(a.scale * kLog2E);
    reg sums[kRows][N];
    multiply<N>(queries, plan.width, keys, plan.width, sums);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < N; ++c)
        V::store_unaligned(scores + r * plan.score_stride + c * V::width,
                           C::scaled_queries ? sums[r][c] : sums[r][c] * scale);
  }

  static void weigh(const Attention& a, const Plan& plan, const float* scores, const float* values, const SeenKeys& seen,
                    const float* weights, const HeadAnswers<C>& out, int64_t first, int64_t rows) {
    values += seen.begin / C::step * kWide;
    for (int64_t column = 0; column < a.value_width; column += kWide, values += plan.depth * kWide) {
      reg sums[kRows][kColumns];
      multiply<kColumns>(scores, plan.score_stride, values, ceil_div(seen.count(), C::step), sums);
      const int64_t left = a.value_width - column;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        if (r >= rows) break;
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) {
          const int64_t at = c * V::width;
          if (left > at) out.store(first + r, column + at, sums[r][c] * V::all(weights[r]), left - at);
        }
      }
    }
  }
};

}  // namespace
