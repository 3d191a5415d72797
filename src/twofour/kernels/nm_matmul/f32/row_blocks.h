// Design C, row-vectorised: vectors hold output rows, the activation is permuted in the register.
//
// The four inputs of a group are broadcast to every 128-bit lane and each row picks its own with the low two bits of
// its metadata dword; the next index is a shift of that dword, because the permute ignores the bits above. The weights
// are one stream that is read once, which is what few tokens are limited by.
// Included once per instruction-set file, with V the vector type of that file; everything has internal linkage.
#pragma once

#include <cstdint>

#include "kernels/layouts/rows.h"
#include "kernels/epilogue_math.h"
#include "kernels/matmul.h"
#include "kernels/row_shape.h"
#include "native/compiler.h"
#include "native/team.h"
#include "native/integers.h"

namespace {

using twofour::kRowTile;
using twofour::kRowUnit;
using twofour::kRowHalfBytes;
using twofour::Matmul;

constexpr int64_t kRowWorkspace = 512 * 1024;  // copied activations per pass over the weights: half of a small L2
using FetchTwice = FetchNearAndFar<2048>;
constexpr int64_t kRowBlock = 16;  // tiles summed on their own: one chain over 4096 inputs erred four times as much

inline int64_t row_tiles(const Matmul& a) { return (a.in_features + kRowTile - 1) / kRowTile; }

// Four inputs as they stand in memory, and in a register.
template <class V>
struct FourInputs {
  static constexpr int64_t width = 4;
  static TWOFOUR_INLINE typename V::reg load(const float* p) { return V::broadcast4(p); }
};

// One tile (Halves x 16 rows, 32 inputs) against T tokens; x is [group][token][X::width]. Two sets of sums where
// registers allow, so that few tokens are not bound by the latency of the multiply-add. `ahead` is for Fetch.
template <class V, class X, class Fetch, int T, int Halves, int Sets>
TWOFOUR_INLINE void add_unit(const char* unit, int64_t ahead, const float* x,
                             typename V::reg (&acc)[Sets][Halves * (kRowUnit / V::width)][T]) {
  constexpr int per_half = kRowUnit / V::width;
  constexpr int vectors = Halves * per_half;
  typename V::ireg index[vectors];
  const float* values[vectors];
  TWOFOUR_UNROLL
  for (int v = 0; v < vectors; v++) {
    const char* half = unit + v / per_half * kRowHalfBytes + v % per_half * V::width * 4;
    index[v] = V::load_index(half);
    Fetch::template fetch<V>(half, ahead);
    values[v] = reinterpret_cast<const float*>(half + kRowUnit * 4);
  }
  TWOFOUR_UNROLL
  for (int g = 0; g < kRowTile / 4; g++) {
    typename V::reg w0[vectors], w1[vectors];
    typename V::ireg next[vectors];
    TWOFOUR_UNROLL
    for (int v = 0; v < vectors; v++) {
      const float* at = values[v] + g * 2 * kRowUnit;
      w0[v] = V::load_aligned(at);
      w1[v] = V::load_aligned(at + kRowUnit);
      Fetch::template fetch<V>(at, ahead);
      Fetch::template fetch<V>(at + kRowUnit, ahead);
      next[v] = V::template shift_right<2>(index[v]);
    }
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      const typename V::reg four = X::load(x + (g * T + t) * X::width);
      TWOFOUR_UNROLL
      for (int v = 0; v < vectors; v++) {
        acc[0][v][t] = V::fma(w0[v], V::permute4(four, index[v]), acc[0][v][t]);
        acc[Sets - 1][v][t] = V::fma(w1[v], V::permute4(four, next[v]), acc[Sets - 1][v][t]);
      }
    }
    TWOFOUR_UNROLL
    for (int v = 0; v < vectors; v++) index[v] = V::template shift_right<4>(index[v]);
  }
}

template <class V, int vectors, int T, int Sets>
TWOFOUR_INLINE void add_sums(const typename V::reg (&acc)[Sets][vectors][T], typename V::reg (&total)[vectors][T]) {
  TWOFOUR_UNROLL
  for (int v = 0; v < vectors; v++) {
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++)
      total[v][t] = total[v][t] + (Sets == 2 ? acc[0][v][t] + acc[Sets - 1][v][t] : acc[0][v][t]);
  }
}

// Rows [row, row + 16 * Halves) of T tokens from `first` on.
template <class V, class Fetch, int T, int Halves>
TWOFOUR_INLINE void row_unit(const Matmul& a, const char* unit, const float* x, int64_t first, int64_t row) {
  constexpr int strips = Fetch::in_order ? Halves : 1;  // of rows that are read one after the other
  constexpr int vectors = Halves / strips * (kRowUnit / V::width);
  constexpr int Sets = strips * vectors * T * 2 <= V::sums ? 2 : 1;
  typename V::reg total[strips][vectors][T] = {};
  for (int64_t left = row_tiles(a); left > 0; left -= kRowBlock) {
    typename V::reg acc[strips][Sets][vectors][T] = {};
    for (int64_t k = least(left, kRowBlock); k > 0; k--, unit += 2 * kRowHalfBytes, x += kRowTile * T) {
      TWOFOUR_UNROLL
      for (int s = 0; s < strips; s++)
        add_unit<V, FourInputs<V>, Fetch, T, Halves / strips, Sets>(unit + s * kRowHalfBytes, 0, x, acc[s]);
    }
    TWOFOUR_UNROLL
    for (int s = 0; s < strips; s++) add_sums<V, vectors, T, Sets>(acc[s], total[s]);
  }
  TWOFOUR_UNROLL
  for (int i = 0; i < strips * vectors; i++) {
    const int64_t m = row + i * V::width, rows = least(V::width, a.out_features - m);
    if (rows <= 0) continue;
    const typename V::reg bias = a.bias == nullptr ? V::zero() : V::load_partial(a.bias + m, rows);
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++)
      V::store_partial(y_of(a) + (first + t) * a.y_stride + m, total[i / vectors][i % vectors][t] + bias, rows);
  }
}

// All rows of units [u0, u1) (32 rows each) for T tokens.
template <class V, class Fetch, int T>
TWOFOUR_NOINLINE void row_units(const Matmul& a, const float* x, int64_t first, int64_t u0, int64_t u1) {
  constexpr int Halves = Fetch::in_order ? 2 : kRowHalves<V>;
  const int64_t unit_bytes = row_tiles(a) * 2 * kRowHalfBytes;
  for (int64_t u = u0; u < u1; u++) {
    const char* unit = static_cast<const char*>(a.weight) + u * unit_bytes;
    for (int h = 0; h < 2; h += Halves)
      row_unit<V, Fetch, T, Halves>(a, unit + h * kRowHalfBytes, x, first, (2 * u + h) * kRowUnit);
  }
}

// The same for `tokens` <= T.
template <class V, class Fetch, int T>
void row_units_of(int64_t tokens, const Matmul& a, const float* x, int64_t first, int64_t u0, int64_t u1) {
  if (tokens == T) return row_units<V, Fetch, T>(a, x, first, u0, u1);
  if constexpr (T > 1) row_units_of<V, Fetch, T - 1>(tokens, a, x, first, u0, u1);
}

// Tokens [first, first + tokens) -> x[group][token][4], zero past in_features. Reading rows of x in place would put
// tokens 4 KB apart into one L1 set when in_features is a multiple of 1024.
inline void copy_tokens(const Matmul& a, int64_t first, int64_t tokens, float* to) {
  const int64_t groups = row_tiles(a) * (kRowTile / 4);
  for (int64_t t = 0; t < tokens; t++) {
    const int64_t whole = a.in_features / 4, split = inputs_in_x(a) / 4;
    const float* from = x_of(a) + (first + t) * a.x_stride;
    for (int64_t g = 0; g < split; g++) __builtin_memcpy(to + (g * tokens + t) * 4, from + g * 4, 16);
    for (int64_t g = split; g < whole; g++)
      __builtin_memcpy(to + (g * tokens + t) * 4, input_at(a, first + t, g * 4), 16);
    for (int64_t g = whole; g < groups; g++) __builtin_memset(to + (g * tokens + t) * 4, 0, 16);
  }
}

// Pieces of at most kRowTokens<V> tokens, as many per pass over the weights as fit kRowWorkspace.
template <class V>
struct RowPlan {
  int64_t piece_floats, pieces;

  explicit RowPlan(const Matmul& a) {
    piece_floats = row_tiles(a) * kRowTile * kRowTokens<V>;
    const int64_t all = (a.tokens + kRowTokens<V> - 1) / kRowTokens<V>, fit = kRowWorkspace / (piece_floats * 4);
    pieces = least(all, fit > 0 ? fit : 1);
  }
};

template <class V>
int64_t row_blocks_workspace(const Matmul& a) {
  const RowPlan<V> plan(a);
  return plan.pieces * plan.piece_floats * 4;
}

template <class V, class Fetch>
void row_blocks(const Matmul& a) {
  if (a.tokens <= 0) return;
  const RowPlan<V> plan(a);
  float* x = static_cast<float*>(a.workspace);
  const int64_t all = (a.tokens + kRowTokens<V> - 1) / kRowTokens<V>;
  with_team(a.threads, [&](const Team& team) {
    int64_t u0, u1;
    team.share((a.out_features + 2 * kRowUnit - 1) / (2 * kRowUnit), 1, &u0, &u1);
    for (int64_t p0 = 0; p0 < all; p0 += plan.pieces) {
      const int64_t p1 = least(p0 + plan.pieces, all);
      if (p0 > 0) team.barrier();  // the last pieces are still being read
      for (int64_t p = p0 + team.me; p < p1; p += team.size) {
        const int64_t first = p * kRowTokens<V>;
        copy_tokens(a, first, least(kRowTokens<V>, a.tokens - first), x + (p - p0) * plan.piece_floats);
      }
      team.barrier();
      for (int64_t p = p0; p < p1; p++) {
        const int64_t first = p * kRowTokens<V>;
        const int64_t tokens = least(kRowTokens<V>, a.tokens - first);
        row_units_of<V, Fetch, kRowTokens<V>>(tokens, a, x + (p - p0) * plan.piece_floats, first, u0, u1);
        const int64_t row = u0 * 2 * kRowUnit, end = least(u1 * 2 * kRowUnit, a.out_features);
        if (!a.epilogue.plain())
          finish_rows<V>(a.epilogue, y_of(a), a.y_stride, first, tokens, row, end - row);
      }
    }
  });
}

}  // namespace
