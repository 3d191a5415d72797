// Design C with x spread: four inputs of a token fill a whole vector in the copy of x.
//
// The load of four inputs is then a plain one. A broadcast of 16 bytes takes a shuffle on Zen 5, and the shuffles are
// what limits design C there: 0.93 against 1.35 multiply-adds per cycle. The copy is four times as large, so it is made
// for a run of inputs at a time, which stays in L1 while all rows pass over it; y holds the sums between the runs.
// Same layout as row_blocks.h. Included once per instruction-set file; everything has internal linkage.
#pragma once

#include <cstdint>

#include "row_blocks.h"

namespace {

constexpr int64_t kSpreadInputs = 16 * 1024;  // bytes of a piece's copied inputs; with 32 KB twice the time from DRAM
constexpr int64_t kSpreadPieces = 16;         // pieces of kRowTokens<V> tokens that share a pass over the weights
constexpr int64_t kSpreadChunk = 256 * 1024;  // bytes of weights that stay in L2 from piece to piece
constexpr int64_t kSpreadAhead = 4;           // tiles (2 KB) fetched ahead, into L1: 5 % over L2
constexpr int64_t kTileBytes = 2 * kRowHalfBytes;

struct FetchAhead {
  template <class V>
  static TWOFOUR_INLINE void fetch(const void* p, int64_t ahead) {
    __builtin_prefetch(static_cast<const char*>(p) + ahead);
  }
};

template <class V>
struct SpreadInputs {
  static constexpr int64_t width = V::width;
  static TWOFOUR_INLINE typename V::reg load(const float* p) { return V::load_aligned(p); }
};

// Which inputs and tokens of a call are being multiplied: tiles [k0, k1) of tokens [first, first + T), copied to `x`.
struct SpreadPart {
  int64_t k0, k1, first;
  const float* x;
};

// A strip is what one pass over a part multiplies: Halves x 16 rows. Its first tile of the part:
template <int Halves>
TWOFOUR_INLINE const char* strip_at(const Matmul& a, const SpreadPart& part, int64_t strip) {
  constexpr int64_t per_unit = 2 / Halves;
  return static_cast<const char*>(a.weight) + (strip / per_unit * row_tiles(a) + part.k0) * kTileBytes +
         strip % per_unit * kRowHalfBytes;
}

// y = sums + bias where the part is the first of the inputs, else y += sums.
template <class V, int vectors, int T>
TWOFOUR_INLINE void add_to_y(const Matmul& a, const SpreadPart& part, int64_t row,
                             const typename V::reg (&total)[vectors][T]) {
  TWOFOUR_UNROLL
  for (int v = 0; v < vectors; v++) {
    const int64_t m = row + v * V::width, rows = least(V::width, a.out_features - m);
    if (rows <= 0) continue;
    const typename V::reg bias = a.bias == nullptr || part.k0 > 0 ? V::zero() : V::load_partial(a.bias + m, rows);
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      float* y = y_of(a) + (part.first + t) * a.y_stride + m;
      V::store_partial(y, total[v][t] + (part.k0 > 0 ? V::load_partial(y, rows) : bias), rows);
    }
  }
}

template <class V, int T, int Halves>
TWOFOUR_INLINE void row_strip(const Matmul& a, const SpreadPart& part, int64_t strip) {
  constexpr int vectors = Halves * (kRowUnit / V::width);
  constexpr int Sets = vectors * T * 2 <= V::sums ? 2 : 1;
  typename V::reg total[vectors][T];
  TWOFOUR_UNROLL
  for (int v = 0; v < vectors; v++) {
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) total[v][t] = V::zero();
  }
  const char* tile = strip_at<Halves>(a, part, strip);
  // From the end of this strip to the start of the next one.
  const int64_t jump = strip_at<Halves>(a, part, strip + 1) - (tile + (part.k1 - part.k0) * kTileBytes);
  const float* x = part.x;
  for (int64_t k = part.k0; k < part.k1;) {
    typename V::reg acc[Sets][vectors][T];
    TWOFOUR_UNROLL
    for (int s = 0; s < Sets; s++) {
      TWOFOUR_UNROLL
      for (int v = 0; v < vectors; v++) {
        TWOFOUR_UNROLL
        for (int t = 0; t < T; t++) acc[s][v][t] = V::zero();
      }
    }
    for (const int64_t stop = least(k + kRowBlock, part.k1); k < stop; k++) {
      const int64_t ahead = (k + kSpreadAhead < part.k1 ? 0 : jump) + kSpreadAhead * kTileBytes;
      add_unit<V, SpreadInputs<V>, FetchAhead, T, Halves, Sets>(tile, ahead, x, acc);
      tile += kTileBytes, x += kRowTile / 4 * T * V::width;
    }
    add_sums<V, vectors, T, Sets>(acc, total);
  }
  add_to_y<V, vectors, T>(a, part, strip * Halves * kRowUnit, total);
}

// Units [u0, u1) (32 rows each) of a part.
template <class V, int T>
TWOFOUR_NOINLINE void spread_units(const Matmul& a, const SpreadPart& part, int64_t u0, int64_t u1) {
  constexpr int Halves = kRowHalves<V>, per_unit = 2 / Halves;
  for (int64_t strip = u0 * per_unit; strip < u1 * per_unit; strip++) row_strip<V, T, Halves>(a, part, strip);
}

// The same for `tokens` <= T.
template <class V, int T>
void spread_units_of(int64_t tokens, const Matmul& a, const SpreadPart& part, int64_t u0, int64_t u1) {
  if (tokens == T) return spread_units<V, T>(a, part, u0, u1);
  if constexpr (T > 1) spread_units_of<V, T - 1>(tokens, a, part, u0, u1);
}

// Inputs of tiles [k0, k1) of some tokens -> to[group][token][V::width], zero past in_features.
template <class V>
void spread_tokens(const Matmul& a, const SpreadPart& part, int64_t tokens, float* to) {
  constexpr int64_t groups_per_tile = kRowTile / 4;
  const int64_t begin = part.k0 * groups_per_tile, groups = (part.k1 - part.k0) * groups_per_tile;
  const int64_t whole = least(groups, a.in_features / 4 - begin), split = least(whole, inputs_in_x(a) / 4 - begin);
  for (int64_t t = 0; t < tokens; t++) {
    const float* from = x_of(a) + (part.first + t) * a.x_stride + begin * 4;
    float* at = to + t * V::width;
    const int64_t step = tokens * V::width;
    for (int64_t g = 0; g < split; g++) V::store_aligned(at + g * step, V::broadcast4(from + g * 4));
    for (int64_t g = split < 0 ? 0 : split; g < whole; g++)
      V::store_aligned(at + g * step, V::broadcast4(input_at(a, part.first + t, (begin + g) * 4)));
    for (int64_t g = whole; g < groups; g++) V::store_aligned(at + g * step, V::zero());
  }
}

// How a call is cut: tokens into even pieces of at most kRowTokens<V>, inputs into runs whose copy stays in L1.
template <class V>
struct SpreadPlan {
  int64_t tokens, pieces, tiles, piece_floats;

  explicit SpreadPlan(const Matmul& a) {
    const int64_t all = a.tokens > 0 ? a.tokens : 1;
    tokens = ceil_div(all, ceil_div(all, kRowTokens<V>));
    pieces = least(ceil_div(all, tokens), kSpreadPieces);
    const int64_t tile_floats = kRowTile / 4 * tokens * V::width;
    tiles = least(row_tiles(a), kSpreadInputs / 4 / tile_floats);
    piece_floats = round_up(tiles * tile_floats, 16);
  }
};

template <class V>
int64_t row_spread_workspace(const Matmul& a) {
  const SpreadPlan<V> plan(a);
  return (a.threads > 1 ? a.threads : 1) * plan.pieces * plan.piece_floats * 4;
}

// Tokens [t0, t1), at most plan.pieces pieces, times units [u0, u1): a run of inputs at a time against some of the
// weights at a time, so that both are read from the caches by the next piece.
template <class V>
void spread_pieces(const Matmul& a, const SpreadPlan<V>& plan, int64_t t0, int64_t t1, int64_t u0, int64_t u1,
                   float* x) {
  for (int64_t k0 = 0; k0 < row_tiles(a); k0 += plan.tiles) {
    const int64_t k1 = least(k0 + plan.tiles, row_tiles(a));
    const int64_t fit = kSpreadChunk / ((k1 - k0) * kTileBytes);
    const int64_t chunk = t1 - t0 > plan.tokens && fit > 1 ? fit : u1 - u0;
    for (int64_t u = u0; u < u1; u += chunk) {
      const int64_t end = least(u + chunk, u1);
      for (int64_t t = t0; t < t1; t += plan.tokens) {
        const int64_t tokens = least(plan.tokens, t1 - t);
        float* piece = x + (t - t0) / plan.tokens * plan.piece_floats;
        const SpreadPart part{k0, k1, t, piece};
        if (u == u0) spread_tokens<V>(a, part, tokens, piece);
        spread_units_of<V, kRowTokens<V>>(tokens, a, part, u, end);
        const int64_t row = u * 2 * kRowUnit, stop = least(end * 2 * kRowUnit, a.out_features);
        if (k1 == row_tiles(a) && !a.epilogue.plain())
          finish_rows<V>(a.epilogue, y_of(a), a.y_stride, t, tokens, row, stop - row);
      }
    }
  }
}

// The members share the rows; each copies x for itself, so none waits for another.
template <class V>
void row_spread(const Matmul& a) {
  if (a.tokens <= 0) return;
  const SpreadPlan<V> plan(a);
  with_team(a.threads, [&](const Team& team) {
    int64_t u0, u1;
    team.share(ceil_div(a.out_features, 2 * kRowUnit), 1, &u0, &u1);
    float* x = static_cast<float*>(a.workspace) + team.me * plan.pieces * plan.piece_floats;
    const int64_t step = plan.pieces * plan.tokens;
    for (int64_t t = 0; t < a.tokens; t += step) spread_pieces(a, plan, t, least(t + step, a.tokens), u0, u1, x);
  });
}

}  // namespace
