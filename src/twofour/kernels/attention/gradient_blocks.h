// Gradients of one head at a time: for each block of queries the scores and their softmax P anew, from it and dP = dO V^T
// the scores' gradient dS = P (dP - sum P dP), and the three products of these; of weights that dropout clears, dP is zero, and
// P for dV. dK and dV are summed over the blocks in a workspace. Internal linkage.
#pragma once

#include <cstring>
#include <type_traits>

#include "blocks.h"
#include "gradient.h"

namespace {

using twofour::AttentionGradient;

// `kRows` by `kColumns` vectors are summed in registers. `C`: what panels and blocks hold; P and dS are floats first.
template <class C, int kRows, int kColumns>
struct GradientBlocks {
  using V = typename C::V;
  using E = typename C::Element;
  using reg = typename V::reg;
  using Forward = Blocks<C, kRows, kColumns>;
  using Sums = reg[kRows][kColumns];
  static constexpr int64_t kWide = Forward::kWide;
  static constexpr int64_t kQueries = 48;  // of a block
  static constexpr bool kPairs = C::step == 2;
  static_assert(kQueries % kRows == 0 && kRows % C::step == 0);

  // Workspace, in cells. Keys and values as panels of their transposes, since scores and dP sum over columns; keys as rows
  // too, for dQ, which sums over them. A block of queries and one of upstream gradients: as rows, where they are summed
  // along, and, for dK and dV, summed over; cells of one number are the same both ways. Rows are as long as panels.
  struct Plan {
    typename Forward::Plan of_keys, of_values;
    int64_t width, value_width, stride, keys_turned, values_turned, keys, queries, upstream, scores, rounded, dk, dv;
    explicit Plan(const Attention& a)
        : of_keys(a),
          of_values(values_as_keys(a)),
          width(round_up(a.width, kWide)),
          value_width(round_up(a.value_width, kWide)),
          stride(of_keys.score_stride),
          keys_turned(of_keys.keys),
          values_turned(of_values.keys),
          keys(round_up(ceil_div(a.keys, C::step) * width, 16)),
          queries(kQueries * width),
          upstream(kQueries * value_width),
          scores(round_up(kQueries * stride, 16)),
          rounded(kPairs ? round_up(kRows * stride, 16) : 0),
          dk(round_up(round_up(a.keys, kRows) * width, 16)),
          dv(round_up(round_up(a.keys, kRows) * value_width, 16)) {}
    int64_t bytes() const {
      return 4 * (keys_turned + values_turned + keys + (queries + upstream) * C::step + 2 * scores + rounded + dk + dv);
    }
  };

  // The call whose keys are the values: what arranges keys then arranges them.
  static Attention values_as_keys(Attention a) {
    a.width = a.value_width;
    return a;
  }

  // A block of rows of one operand, arranged both ways.
  struct Block {
    float *along, *over;
    int64_t width;  // of a row

    Block(float* memory, int64_t cells, int64_t padded) : along(memory), over(kPairs ? memory + cells : memory), width(padded) {}
    // Rows [first, first + rows) of `numbers` each; those behind them up to `padded` are zero.
    void fill(const HeadRows<const E>& from, int64_t first, int64_t rows, int64_t padded, int64_t numbers, float factor) {
      for (int64_t r = 0; r < padded; ++r) copy(from.at(r < rows ? first + r : first), r < rows ? numbers : 0, factor, along + r * width, width);
      if constexpr (kPairs)
        for (int64_t r = 0; r < padded; r += 2)
          pair(from.at(r < rows ? first + r : first), r + 1 < rows ? from.at(first + r + 1) : nullptr, r < rows ? numbers : 0,
               over + r / 2 * width, width);
    }
  };

  static void run(const AttentionGradient& g, int64_t begin, int64_t end, float* workspace) {
    const Attention& a = g.of;
    const Attention turned = values_as_keys(a);
    const Plan plan(a);
    float *keys_turned = workspace, *values_turned = keys_turned + plan.keys_turned;
    float *keys = values_turned + plan.values_turned, *at = keys + plan.keys;
    Block queries(at, plan.queries, plan.width), upstream(at += C::step * plan.queries, plan.upstream, plan.value_width);
    float *scores = at + C::step * plan.upstream, *slopes = scores + plan.scores, *rounded = slopes + plan.scores;
    float *dk = rounded + plan.rounded, *dv = dk + plan.dk;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t batch = item / a.heads, head = item % a.heads;
      const auto k = a.template key_rows<E>(batch, head);
      const auto q = a.template query_rows<E>(batch, head);
      const auto dout = rows_of<const E>(g.upstream, g.upstream_strides, batch, head);
      const auto dq = rows_of<E>(g.dq, g.dq_strides, batch, head);
      Forward::pack_keys(a, plan.of_keys, k, keys_turned);
      Forward::pack_keys(turned, plan.of_values, a.template value_rows<E>(batch, head), values_turned);
      for (int64_t key = 0; key < a.keys; key += C::step)
        pair(k.at(key), key + 1 < a.keys ? k.at(key + 1) : nullptr, a.width, keys + key / C::step * plan.width, plan.width);
      std::memset(dk, 0, sizeof(float) * static_cast<size_t>(plan.dk + plan.dv));
      for (int64_t row = 0; row < a.queries; row += kQueries) {
        const int64_t rows = least(a.queries - row, kQueries), padded = round_up(rows, kRows);
        const int64_t seen = a.causal ? least(row + rows, a.keys) : a.keys;
        queries.fill(q, row, rows, padded, a.width, C::scaled_queries ? a.scale * kLog2E : 1.0f);
        upstream.fill(dout, row, rows, padded, a.value_width, 1.0f);
        for (int64_t r = 0; r < padded; r += kRows) {
          float *s = scores + r * plan.stride, *d = slopes + r * plan.stride;
          const int64_t real = least(rows - r, kRows);
          times_panels(queries, r, keys_turned, a.width, C::scaled_queries ? 1.0f : a.scale * kLog2E, seen, s, plan.stride);
          times_panels(upstream, r, values_turned, a.value_width, 1.0f, seen, d, plan.stride);
          slope(a, batch, head, row + r, real, seen, plan.stride, s, d);
          const float* left = d;
          if constexpr (kPairs) round_rows(d, rounded, seen, plan.stride), left = rounded;
          for (int64_t column = 0; column < a.width; column += kWide) {
            Sums sums;
            clear(sums);
            add_products<false>(left, plan.stride, keys + column, plan.width, ceil_div(seen, C::step), sums);
            store(sums, dq, row + r, real, column, a.width, a.scale);
          }
        }
        if constexpr (kPairs) pair_rows(scores, padded, seen, plan.stride), pair_rows(slopes, padded, seen, plan.stride);
        add_turned(scores, plan.stride * C::step, upstream, ceil_div(rows, C::step), seen, dv);
        add_turned(slopes, plan.stride * C::step, queries, ceil_div(rows, C::step), seen, dk);
      }
      // Queries that are scaled have log2(e) in them too.
      leave(dk, plan.width, C::scaled_queries ? 1.0f / kLog2E : a.scale, rows_of<E>(g.dk, g.dk_strides, batch, head), a.keys, a.width);
      leave(dv, plan.value_width, 1.0f, rows_of<E>(g.dv, g.dv_strides, batch, head), a.keys, a.value_width);
    }
  }

  template <class Number>
  static HeadRows<Number> rows_of(std::conditional_t<std::is_const_v<Number>, const void*, void*> data,
                                  const twofour::Strides& s, int64_t batch, int64_t head) {
    return {static_cast<Number*>(data) + s.at(batch, head), s.row, nullptr};
  }

  // A row of cells along its numbers, times `factor` where those are single; zeros behind them up to `padded`, a multiple of
  // kWide.
  static void copy(const E* from, int64_t numbers, float factor, float* to, int64_t padded) {
    for (int64_t cell = 0; cell < padded; cell += V::width) {
      const int64_t left = numbers - cell * C::step;
      reg found = left > 0 ? C::load(from + cell * C::step, least(left, V::width * C::step)) : V::zero();
      if (C::scaled_queries) found = found * V::all(factor);
      V::store_unaligned(to + cell, found);
    }
  }
  // A row of cells whose numbers stand below each other: of `row` alone, or of it and `next`, which may be null.
  static void pair(const E* row, const E* next, int64_t numbers, float* to, int64_t padded) {
    for (int64_t i = 0; i < padded; i += V::width) {
      const int64_t left = least(numbers - i, V::width);
      const E* below = next == nullptr ? nullptr : next + i;
      V::store_unaligned(to + i, left > 0 ? C::load_column(row + i, below, left) : V::zero());
    }
  }

  // kRows rows of floats as cells along them: `seen` numbers and a zero where they end in half a cell.
  static void round_rows(const float* from, float* to, int64_t seen, int64_t stride) {
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t i = 0; i < seen + 1; i += V::width)
        C::store_weights(to + r * stride, i, V::load_unaligned(from + r * stride + i), V::width);
  }
  // Rows of floats as cells over two of them, in place: rows 0 and 1 in the place of row 0, and so on.
  static void pair_rows(float* rows, int64_t count, int64_t seen, int64_t stride) {
    for (int64_t r = 0; r < count; r += 2)
      for (int64_t i = 0; i < seen + kRows; i += V::width) {
        float* at = rows + r * stride + i;
        V::store_unaligned(at, C::both(V::load_unaligned(at), V::load_unaligned(at + stride)));
      }
  }

  static TWOFOUR_INLINE void clear(Sums& sums) {
    TWOFOUR_UNROLL
    for (int r = 0; r < kRows; ++r) {
      TWOFOUR_UNROLL
      for (int c = 0; c < kColumns; ++c) sums[r][c] = V::zero();
    }
  }

  // sums[r][c] += sum over cells k of left[r][k] right[k][c], or, `turned`, of left[k][r] right[k][c].
  template <bool turned>
  static TWOFOUR_INLINE void add_products(const float* left, int64_t left_stride, const float* right, int64_t right_stride,
                                          int64_t depth, Sums& sums) {
    for (int64_t k = 0; k < depth; ++k, right += right_stride) {
      reg columns[kColumns];
      TWOFOUR_UNROLL
      for (int c = 0; c < kColumns; ++c) columns[c] = V::load_shared(right + c * V::width);
      TWOFOUR_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const reg value = V::broadcast_shared(turned ? left + k * left_stride + r : left + r * left_stride + k);
        TWOFOUR_UNROLL
        for (int c = 0; c < kColumns; ++c) sums[r][c] = C::multiply_add(value, columns[c], sums[r][c]);
      }
    }
  }

  // kRows rows of a block from `row` on times what panels hold, `numbers` of each: `seen` columns, up to whole panels.
  static void times_panels(const Block& left, int64_t row, const float* panels, int64_t numbers, float factor, int64_t seen,
                           float* to, int64_t stride) {
    const int64_t depth = ceil_div(numbers, C::step);
    for (int64_t key = 0; key < seen; key += kWide) {
      Sums sums;
      clear(sums);
      add_products<false>(left.along + row * left.width, left.width, panels + key * depth, kWide, depth, sums);
      TWOFOUR_UNROLL
      for (int r = 0; r < kRows; ++r) {
        TWOFOUR_UNROLL
        for (int c = 0; c < kColumns; ++c) V::store_unaligned(to + r * stride + key + c * V::width, sums[r][c] * V::all(factor));
      }
    }
  }

  // Scores of kRows queries from `row` on, `rows` of them real, become P, and dP becomes dS. Behind the last key that is
  // seen both are zero, as far as a block of keys goes.
  static void slope(const Attention& a, int64_t batch, int64_t head, int64_t row, int64_t rows, int64_t seen, int64_t stride,
                    float* scores, float* slopes) {
    using Floats = FloatCells<E>;  // P stays in floats
    constexpr int kBeside = Forward::kBeside;
    float weights[kRows];
    if (a.mask_kind == AttentionMask::none && !a.causal) {
      for (int r = 0; r < kRows; r += kBeside)
        softmax_beside<Floats, kBeside>(seen, stride, 0.0f, scores + r * stride, weights + r);
    } else {
      for (int64_t r = 0; r < rows; ++r) weights[r] = softmax<Floats>(a, batch, head, row + r, 0, seen, scores + r * stride);
    }
    for (int64_t r = 0; r < kRows; ++r) {
      float *p = scores + r * stride, *d = slopes + r * stride;
      const int64_t real = r < rows ? seen : 0;
      if (a.drop_below != 0) drop<Floats>(a, batch, head, row + r, real, a.kept_factor(), d);
      reg total = V::zero();
      for (int64_t j = 0; j < real; j += V::width) {
        const reg x = V::load(p + j, real - j) * V::all(weights[r]);
        V::store_unaligned(p + j, x);
        total = V::fma(x, V::load(d + j, real - j), total);
      }
      const reg mean = V::all(V::sum(total));
      int64_t j = 0;
      for (; j < real; j += V::width) V::store_unaligned(d + j, V::load_unaligned(p + j) * (V::load(d + j, real - j) - mean));
      if (a.drop_below != 0) drop<Floats>(a, batch, head, row + r, real, a.kept_factor(), p);
      for (; j < seen + V::width; j += V::width) V::store_unaligned(p + j, V::zero()), V::store_unaligned(d + j, V::zero());
    }
  }

  // to[key][column] += sum over queries of left[query][key] right[query][column]
  static void add_turned(const float* left, int64_t left_stride, const Block& right, int64_t depth, int64_t seen, float* to) {
    for (int64_t column = 0; column < right.width; column += kWide)
      for (int64_t key = 0; key < seen; key += kRows) {
        float* at = to + key * right.width + column;
        Sums sums;
        TWOFOUR_UNROLL
        for (int r = 0; r < kRows; ++r) {
          TWOFOUR_UNROLL
          for (int c = 0; c < kColumns; ++c) sums[r][c] = V::load_unaligned(at + r * right.width + c * V::width);
        }
        add_products<true>(left + key, left_stride, right.over + column, right.width, depth, sums);
        TWOFOUR_UNROLL
        for (int r = 0; r < kRows; ++r) {
          TWOFOUR_UNROLL
          for (int c = 0; c < kColumns; ++c) V::store_unaligned(at + r * right.width + c * V::width, sums[r][c]);
        }
      }
  }

  static TWOFOUR_INLINE void store(const Sums& sums, const HeadRows<E>& to, int64_t first, int64_t rows, int64_t column,
                                   int64_t width, float factor) {
    TWOFOUR_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) break;
      TWOFOUR_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        const int64_t at = column + c * V::width;
        if (at < width) V::store(to.at(first + r) + at, sums[r][c] * V::all(factor), width - at);
      }
    }
  }

  static void leave(const float* from, int64_t stride, float factor, const HeadRows<E>& to, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < width; i += V::width)
        V::store(to.at(row) + i, V::load_unaligned(from + row * stride + i) * V::all(factor), width - i);
  }
};

// Wide blocks where heads fill them, else narrow ones.
template <class Wide, class Narrow>
struct GradientRows {
  static bool wide(const Attention& a) { return a.width % Wide::kWide == 0 && a.value_width % Wide::kWide == 0; }
  static int64_t bytes(const AttentionGradient& g) {
    return wide(g.of) ? typename Wide::Plan(g.of).bytes() : typename Narrow::Plan(g.of).bytes();
  }
  static void run(const AttentionGradient& g, int64_t begin, int64_t end, void* workspace) {
    float* floats = static_cast<float*>(workspace);
    if (wide(g.of)) Wide::run(g, begin, end, floats);
    else Narrow::run(g, begin, end, floats);
  }
};

}  // namespace
