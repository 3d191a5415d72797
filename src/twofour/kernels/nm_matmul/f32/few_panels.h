// Few tokens on the layout "panels": a vector holds two inputs of each of its tokens, so that the two kept weights of a group are
// one multiply-add, and one address serves both.
//
// A panel has a row for each of the six pairs of inputs that a group of four can keep, a vector for every eight tokens:
//
//     row 7 g + code:   x_i x_j of t0 | x_i x_j of t4 | t1 | t5 | t2 | t6 | t3 | t7       i, j of the group g, code = i | j << 2
//
// (vectors of four tokens: t0 | t2 | t1 | t3). The codes 4, 8, 9, 12, 13 and 14 differ modulo 7: rows of neighbouring groups
// interleave, none meets another, and the code itself is the address. A register of weights of a row is loaded at once and
// permuted into broadcast pairs: on Zen 4, a permute for two multiply-adds of 64 bytes takes 1.0 cycles each, a broadcasting load
// 1.3, and loads of a weight and of x for each one 2.0. Internal linkage.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "few_vectors.h"
#include "kernels/epilogue_math.h"
#include "kernels/panel_steps.h"
#include "native/team.h"
#include "token_panels.h"

namespace {

constexpr int64_t kFewPiece = 16;    // tokens that share a pass over the rows
constexpr int64_t kFewPieces = 4;    // pieces that share the weights
constexpr int64_t kFewNear = 2048;   // bytes of weights fetched ahead into L1
constexpr int64_t kFewFar = 16384;   // and into L2: L1 alone has too few lines on their way for memory's latency
constexpr int64_t kFewRows = 7;      // rows of a panel that a group adds
constexpr int64_t kTileGroups = kPanelTile / 4;
constexpr int kFewShift = 7;         // log2 of the bytes of the widest row of a panel

// log2 of the bytes of a panel's row of U vectors.
template <class V>
constexpr int few_shift(int vectors) {
  return log2_of(panel_stride(vectors) * V::width * 4);
}

// Inputs [k, k + count) of a token, at most a vector; zero where there is no such token.
template <class V>
inline typename V::reg few_inputs(const Matmul& a, int64_t token, int64_t k, int64_t count) {
  if (token >= a.tokens) return V::zero();
  if (!a.columns) return V::load(input_at(a, token, k), count);
  alignas(64) float inputs[V::width] = {};
  for (int64_t i = 0; i < least(count, V::width); i++) inputs[i] = x_of(a)[(k + i) * a.x_stride + token];
  return V::load(inputs);
}

// The pair (i, j) of four inputs of the first half of a vector's tokens, and of the second.
template <class V, int i, int j>
TWOFOUR_INLINE void store_pair(typename V::reg low, typename V::reg high, char* rows, int64_t stride) {
  V::store(reinterpret_cast<float*>(rows + (i | j << 2) * stride), V::template shuffle<(i | j << 2) * 17>(low, high));
}

// Groups [begin, end), begin a multiple of 4, of a vector's tokens from `token` on. Those that x lacks are zero where padding
// reads them, at the code of (0, 1).
template <class V>
inline void pack_few(const Matmul& a, int64_t token, int64_t begin, int64_t end, char* panel, int64_t stride) {
  const int64_t groups = a.in_features / 4;
  for (int64_t g = begin; g < end; g += V::quarters) {
    typename V::reg x[V::tokens], fours[2][V::quarters];
    const int64_t there = least(V::quarters, groups - g);
    TWOFOUR_UNROLL
    for (int i = 0; i < V::tokens; i++) x[i] = there > 0 ? few_inputs<V>(a, token + i, g * 4, there * 4) : V::zero();
    V::transpose(x, fours[0]);
    V::transpose(x + V::quarters, fours[1]);
    TWOFOUR_UNROLL
    for (int i = 0; i < V::quarters; i++) {
      if (g + i >= end) break;
      char* rows = panel + kFewRows * (g + i) * stride;
      const typename V::reg low = fours[0][i], high = fours[1][i];
      store_pair<V, 0, 1>(low, high, rows, stride);
      if (i >= there) continue;
      store_pair<V, 0, 2>(low, high, rows, stride);
      store_pair<V, 0, 3>(low, high, rows, stride);
      store_pair<V, 1, 2>(low, high, rows, stride);
      store_pair<V, 1, 3>(low, high, rows, stride);
      store_pair<V, 2, 3>(low, high, rows, stride);
    }
  }
}

// Group `group` of a tile, the pair `pair` of a register of weights of each of R rows, against U vectors of the panel's rows
// from x on.
template <class V, int U, int R, int group>
TWOFOUR_INLINE void add_few_group(const char* x, const uint64_t (&meta)[R], const typename V::Weights (&weights)[R],
                                  const typename V::Places& places, typename V::reg (&acc)[R][U]) {
  constexpr int shift = few_shift<V>(U);
  TWOFOUR_UNROLL
  for (int r = 0; r < R; r++) {
    uint64_t code = turned(meta[r], shift - 4 * group) & (uint64_t{15} << shift);
    asm("" : "+r"(code));
    const char* row = x + code + ((kFewRows * group) << shift);
    if (U > 2) asm("" : "+r"(row));  // one base register: an FMA with an indexed operand splits in two on Intel
    const typename V::reg w = V::template broadcast<group % V::pairs>(weights[r], places);
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) acc[r][u] = V::fma(w, reinterpret_cast<const float*>(row) + u * V::width, acc[r][u]);
  }
}

// What a register of weights of R rows holds, the one from group `first` of a tile on.
template <class V, int U, int R, int first>
TWOFOUR_INLINE void add_few(const char* values, const char* x, const uint64_t (&meta)[R], const typename V::Places& places,
                            typename V::reg (&acc)[R][U]) {
  typename V::Weights weights[R];
  TWOFOUR_UNROLL
  for (int r = 0; r < R; r++) weights[r] = V::load_pairs(values + r * FloatBlock::kRowBytes + first * 8);
  [&]<int... pair>(std::integer_sequence<int, pair...>) TWOFOUR_INLINED {
    (add_few_group<V, U, R, first + pair>(x, meta, weights, places, acc), ...);
  }(std::make_integer_sequence<int, V::pairs>{});
}

// A tile of R rows from `row` of the block on; sums are U vectors for each two rows, the sums over both inputs of a pair: quarters
// of (row 0: two tokens, row 1: the same). `half`: the tile's second half is padding.
template <class V, int U, int R>
TWOFOUR_INLINE void add_few_rows(const FloatBlock& block, int64_t row, int64_t tile, bool half, const char* x, float* sums) {
  const typename V::Places places;
  typename V::reg acc[R][U] = {};
  uint64_t meta[R];
  std::memcpy(meta, block.meta(tile, row), sizeof(meta));
  const char* values = block.values(tile, row);
  for (int64_t line = 0; line < R * FloatBlock::kRowBytes; line += 64) Lanes::prefetch(values + line, kFewNear, kFewFar);
  add_few<V, U, R, 0>(values, x, meta, places, acc);
  if constexpr (V::pairs == 4) add_few<V, U, R, 4>(values, x, meta, places, acc);
  if (!half) {
    add_few<V, U, R, 8>(values, x, meta, places, acc);
    if constexpr (V::pairs == 4) add_few<V, U, R, 12>(values, x, meta, places, acc);
  }
  TWOFOUR_UNROLL
  for (int r = 0; r < R; r += 2) {
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) {
      float* at = sums + (r / 2 * U + u) * V::width;
      const typename V::reg one = acc[r][u], two = r + 1 < R ? acc[r + 1 < R ? r + 1 : r][u] : V::zero();
      const typename V::reg both = V::template shuffle<0x88>(one, two) + V::template shuffle<0xdd>(one, two);
      V::store(at, tile == 0 ? both : both + V::load(at));
    }
  }
}

// The same for rows [begin, end).
template <class V, int U>
TWOFOUR_NOINLINE void add_few_chunk(const FloatBlock& block, int64_t begin, int64_t end, int64_t tile, bool half,
                                    const char* x, float* sums) {
  constexpr int together = V::sums / U < 4 ? 2 : 4;
  int64_t r = begin;
  const auto to = [&] { return sums + (r - begin) / 2 * U * V::width; };
  for (; r + together <= end; r += together) add_few_rows<V, U, together>(block, r, tile, half, x, to());
  for (; r + 2 <= end; r += 2) add_few_rows<V, U, 2>(block, r, tile, half, x, to());
  if (r < end) add_few_rows<V, U, 1>(block, r, tile, half, x, to());
}

// A vector's tokens of rows [row, row + rows), at most V::width: two rows each `step` floats.
template <class V>
inline void store_few(const Matmul& a, int64_t token, int64_t row, int64_t rows, const float* sums, int64_t step) {
  typename V::reg two[2 * V::quarters], four[V::quarters], tokens[V::tokens];
  for (int i = 0; i < 2 * V::quarters; i++) two[i] = 2 * i < rows ? V::load(sums + i * step) : V::zero();
  for (int i = 0; i < V::quarters; i++) four[i] = V::template shuffle<0x88>(two[2 * i], two[2 * i + 1]);
  V::transpose(four, tokens);
  for (int i = 0; i < V::quarters; i++) four[i] = V::template shuffle<0xdd>(two[2 * i], two[2 * i + 1]);
  V::transpose(four, tokens + V::quarters);
  const int64_t there = least(V::tokens, a.tokens - token);
  if (!a.columns) {
    const typename V::reg bias = a.bias == nullptr ? V::zero() : V::load(a.bias + row, rows);
    for (int64_t t = 0; t < there; t++) V::store(y_of(a) + (token + t) * a.y_stride + row, tokens[t] + bias, rows);
    return;
  }
  alignas(64) float turned_back[V::tokens][V::width];
  for (int64_t t = 0; t < there; t++) V::store(turned_back[t], tokens[t]);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t t = 0; t < there; t++) y_of(a)[(row + r) * a.y_stride + token + t] = turned_back[t][r];
}

// How a call is cut: pieces of 16 tokens, some of which share a pass over the weights.
struct FewPlan {
  int64_t tiles, pieces, panel_bytes, sums_floats;

  explicit FewPlan(const Matmul& a)
      : tiles(panel_tiles(a)),
        pieces(least(kFewPieces, ceil_div(a.tokens > 0 ? a.tokens : 1, kFewPiece))),
        panel_bytes((kFewRows * tiles * kTileGroups + 16) << kFewShift),
        sums_floats(kPanelRows * kFewPiece) {}
  int64_t threads(const Matmul& a) const { return a.threads > 1 ? a.threads : 1; }
  int64_t bytes(const Matmul& a) const { return pieces * (panel_bytes + threads(a) * sums_floats * 4); }
};

// The vectors of a piece.
template <class Vector, int Vectors>
struct FewCut {
  using V = Vector;
  static constexpr int vectors = Vectors, shift = few_shift<V>(Vectors);
};

// Pieces of tokens from `first` on, packed in `panels`.
struct FewPieces {
  const Matmul& a;
  const FewPlan& plan;
  int64_t first, count;
  char* panels;
  float* sums;

  int64_t token(int64_t piece) const { return first + piece * kFewPiece; }
  char* panel(int64_t piece) const { return panels + piece * plan.panel_bytes; }
  float* sums_of(int64_t piece) const { return sums + piece * plan.sums_floats; }

  // Calls use(FewCut): the widest vectors where they have no more padding than half ones.
  template <class Use>
  TWOFOUR_INLINE void cut(int64_t piece, const Use& use) const {
    const int64_t tokens = least(kFewPiece, a.tokens - token(piece));
    if (tokens <= 4) return use(FewCut<FewHalf, 1>{});
    if (tokens <= 8) return use(FewCut<FewHalf, 2>{});
    if (tokens <= 12) return use(FewCut<FewHalf, 3>{});
#if defined(TWOFOUR_SET_avx512)
    use(FewCut<FewWhole, 2>{});
#else
    use(FewCut<FewHalf, 4>{});
#endif
  }

  // Groups [begin, end) of every piece, a tile at a time: its rows are whole before they leave L1.
  void pack(int64_t begin, int64_t end) const {
    for (int64_t p = 0; p < count; p++)
      cut(p, [&](auto of) {
        using V = typename decltype(of)::V;
        for (int64_t g = begin; g < end; g += kTileGroups)
          for (int u = 0; u < of.vectors; u++)
            pack_few<V>(a, token(p) + u * V::tokens, g, least(end, g + kTileGroups), panel(p) + u * V::width * 4,
                        int64_t{1} << of.shift);
      });
  }
  // Rows that lie in one block.
  void multiply(const RowChunk& chunk) const {
    const FloatBlock block(static_cast<const char*>(a.weight), chunk.row, a.out_features, a.in_features);
    const int64_t begin = chunk.row - block.first, end = begin + chunk.rows;
    for (int64_t t = 0; t < plan.tiles; t++) {
      const bool half = a.in_features / 4 <= t * kTileGroups + kTileGroups / 2;
      for (int64_t p = 0; p < count; p++)
        cut(p, [&](auto of) {
          const char* x = panel(p) + ((t * kTileGroups * kFewRows) << of.shift);
          add_few_chunk<typename decltype(of)::V, of.vectors>(block, begin, end, t, half, x, sums_of(p));
        });
    }
    for (int64_t p = 0; p < count; p++) store(p, chunk);
  }
  void store(int64_t piece, const RowChunk& chunk) const {
    cut(piece, [&](auto of) {
      using V = typename decltype(of)::V;
      for (int64_t r = 0; r < chunk.rows; r += V::width)
        for (int u = 0; u < of.vectors; u++)
          store_few<V>(a, token(piece) + u * V::tokens, chunk.row + r, least(V::width, chunk.rows - r),
                       sums_of(piece) + (r / 2 * of.vectors + u) * V::width, of.vectors * V::width);
    });
    if (a.columns || a.epilogue.plain()) return;
    const int64_t tokens = least(kFewPiece, a.tokens - token(piece));
    finish_rows<Lanes>(a.epilogue, y_of(a), a.y_stride, token(piece), tokens, chunk.row, chunk.rows);
  }
};

// The members pack the groups together, then share the rows.
inline void few_panels(const Matmul& a) {
  const FewPlan plan(a);
  with_team(a.threads, [&](const Team& team) {
    char* panels = static_cast<char*>(a.workspace);
    float* sums = floats_at(panels + plan.pieces * plan.panel_bytes, team.me * plan.pieces * plan.sums_floats * 4);
    for (int64_t first = 0; first < a.tokens; first += plan.pieces * kFewPiece) {
      const FewPieces pieces{a, plan, first, least(plan.pieces, ceil_div(a.tokens - first, kFewPiece)), panels, sums};
      if (first > 0) team.barrier();  // the panels of the last pieces are still being read
      int64_t begin, end;
      team.share(plan.tiles * kTileGroups, 4, &begin, &end);
      pieces.pack(begin, end);
      team.barrier();
      team.share(a.out_features, BlockWeights::grain, &begin, &end);
      for (int64_t m = begin; m < end; m += kPanelRows - m % kPanelRows)
        pieces.multiply({m, least(kPanelRows - m % kPanelRows, end - m)});
    }
  });
}

}  // namespace
