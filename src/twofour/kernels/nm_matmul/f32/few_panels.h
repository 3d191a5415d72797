// Few tokens on the layout "panels": a vector holds two inputs of eight tokens, so that the two kept weights of a group are
// one multiply-add, and one address serves both.
//
// A panel has a row for each of the six pairs of inputs that a group of four can keep:
//
//     row 7 g + code:   x_i x_j of t0 | x_i x_j of t4 | t1 | t5 | t2 | t6 | t3 | t7       i, j of the group g, code = i | j << 2
//
// The codes 4, 8, 9, 12, 13 and 14 differ modulo 7: rows of neighbouring groups interleave, none meets another, and the code
// itself is the address. Sixteen weights of a row are loaded at once and permuted into broadcast pairs: on Zen 4, a permute
// for two multiply-adds takes 1.0 cycles each, a broadcasting load 1.3, and loads of a weight and of x for each one 2.0.
// For AVX-512 alone; internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/epilogue_math.h"
#include "kernels/panel_steps.h"
#include "native/team.h"
#include "token_panels.h"

namespace {

constexpr int64_t kFewTokens = 8;    // of a vector
constexpr int64_t kFewPiece = 16;    // tokens that share a pass over the rows
constexpr int64_t kFewPieces = 4;    // pieces that share the weights
constexpr int64_t kFewAhead = 4096;  // bytes of weights fetched ahead into L1
constexpr int64_t kFewRows = 7;      // rows of a panel that a group adds
constexpr int64_t kTileGroups = kPanelTile / 4;
constexpr int kFewTogether = 4;      // rows of the weight

// log2 of the bytes of a panel's row of U vectors.
constexpr int few_shift(int vectors) { return vectors == 1 ? 6 : 7; }

// Fours of four vectors, transposed as a matrix of 4 x 4.
inline void transpose_lanes(const __m512* from, __m512* to) {
  const __m512 a = _mm512_shuffle_f32x4(from[0], from[1], 0x44), b = _mm512_shuffle_f32x4(from[2], from[3], 0x44);
  const __m512 c = _mm512_shuffle_f32x4(from[0], from[1], 0xee), d = _mm512_shuffle_f32x4(from[2], from[3], 0xee);
  to[0] = _mm512_shuffle_f32x4(a, b, 0x88);
  to[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
  to[2] = _mm512_shuffle_f32x4(c, d, 0x88);
  to[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
}

// Inputs [k, k + count) of a token, at most 16; zero where there is no such token.
inline __m512 few_inputs(const Matmul& a, int64_t token, int64_t k, int64_t count) {
  if (token >= a.tokens) return _mm512_setzero_ps();
  if (!a.columns) return Lanes::load(input_at(a, token, k), count);
  alignas(64) float inputs[16] = {};
  for (int64_t i = 0; i < least(count, 16); i++) inputs[i] = x_of(a)[(k + i) * a.x_stride + token];
  return _mm512_load_ps(inputs);
}

// The pair (i, j) of four inputs of tokens 0 to 3, and 4 to 7.
template <int i, int j>
TWOFOUR_INLINE void store_pair(__m512 low, __m512 high, char* rows, int64_t stride) {
  _mm512_store_ps(reinterpret_cast<float*>(rows + (i | j << 2) * stride), _mm512_shuffle_ps(low, high, (i | j << 2) * 17));
}

// Groups [begin, end), begin a multiple of 4, of eight tokens from `token` on. Those that x lacks are zero where padding
// reads them, at the code of (0, 1).
inline void pack_few(const Matmul& a, int64_t token, int64_t begin, int64_t end, char* panel, int64_t stride) {
  const int64_t groups = a.in_features / 4;
  for (int64_t g = begin; g < end; g += 4) {
    __m512 x[kFewTokens], fours[2][4];
    const int64_t there = least(4, groups - g);
    for (int i = 0; i < kFewTokens; i++)
      x[i] = there > 0 ? few_inputs(a, token + i, g * 4, there * 4) : _mm512_setzero_ps();
    transpose_lanes(x, fours[0]);
    transpose_lanes(x + 4, fours[1]);
    for (int64_t i = 0; i < least(4, end - g); i++) {
      char* rows = panel + kFewRows * (g + i) * stride;
      const __m512 low = fours[0][i], high = fours[1][i];
      store_pair<0, 1>(low, high, rows, stride);
      if (i >= there) continue;
      store_pair<0, 2>(low, high, rows, stride);
      store_pair<0, 3>(low, high, rows, stride);
      store_pair<1, 2>(low, high, rows, stride);
      store_pair<1, 3>(low, high, rows, stride);
      store_pair<2, 3>(low, high, rows, stride);
    }
  }
}

// A half of a tile, 32 inputs of R rows: eight pairs of weights each, against U vectors of the panel's rows from x on.
template <int U, int R, int half>
TWOFOUR_INLINE void add_few(const char* values, const char* x, const uint64_t (&meta)[R], const __m512i (&pair)[8],
                            __m512 (&acc)[R][U]) {
  constexpr int shift = few_shift(U);
  values += half * 64;
  __m512d weights[R];
  TWOFOUR_UNROLL
  for (int r = 0; r < R; r++) {
    weights[r] = _mm512_load_pd(values + r * FloatBlock::kRowBytes);
    asm("" : "+v"(weights[r]));  // else every permute loads it
  }
  TWOFOUR_UNROLL
  for (int g = 0; g < 8; g++) {
    TWOFOUR_UNROLL
    for (int r = 0; r < R; r++) {
      const char* row = x + (turned(meta[r], shift - 4 * (half * 8 + g)) & (uint64_t{15} << shift)) +
                        ((kFewRows * (half * 8 + g)) << shift);
      asm("" : "+r"(row));  // one base register: an FMA with an indexed operand splits in two on Intel
      const __m512 w = _mm512_castpd_ps(_mm512_permutexvar_pd(pair[g], weights[r]));
      TWOFOUR_UNROLL
      for (int u = 0; u < U; u++) acc[r][u] = Lanes::fma(w, reinterpret_cast<const float*>(row) + u * 16, acc[r][u]);
    }
  }
}

// Of two rows, the sums over both inputs of a pair: four lanes of (row 0: t, t + 4, row 1: t, t + 4).
inline __m512 sum_pairs(__m512 a, __m512 b) {
  return _mm512_shuffle_ps(a, b, 0x88) + _mm512_shuffle_ps(a, b, 0xdd);
}

// A tile of R rows from `row` of the block on; sums are U vectors for each two rows. `half`: the tile's second half is padding.
template <int U, int R>
TWOFOUR_INLINE void add_few_rows(const FloatBlock& block, int64_t row, int64_t tile, bool half, const char* x, float* sums) {
  __m512i pair[8];
  TWOFOUR_UNROLL
  for (int i = 0; i < 8; i++) {
    pair[i] = _mm512_set1_epi64(i);
    asm("" : "+v"(pair[i]));  // kept in a register
  }
  __m512 acc[R][U] = {};
  uint64_t meta[R];
  std::memcpy(meta, block.meta(tile, row), sizeof(meta));
  const char* values = block.values(tile, row);
  for (int64_t line = 0; line < R * FloatBlock::kRowBytes; line += 64) __builtin_prefetch(values + kFewAhead + line);
  add_few<U, R, 0>(values, x, meta, pair, acc);
  if (!half) add_few<U, R, 1>(values, x, meta, pair, acc);
  TWOFOUR_UNROLL
  for (int r = 0; r < R; r += 2) {
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) {
      float* at = sums + (r / 2 * U + u) * 16;
      const __m512 both = sum_pairs(acc[r][u], r + 1 < R ? acc[r + 1 < R ? r + 1 : r][u] : _mm512_setzero_ps());
      _mm512_store_ps(at, tile == 0 ? both : both + _mm512_load_ps(at));
    }
  }
}

// The same for rows [begin, end).
template <int U>
TWOFOUR_NOINLINE void add_few_chunk(const FloatBlock& block, int64_t begin, int64_t end, int64_t tile, bool half,
                                    const char* x, float* sums) {
  int64_t r = begin;
  const auto to = [&] { return sums + (r - begin) / 2 * U * 16; };
  for (; r + kFewTogether <= end; r += kFewTogether) add_few_rows<U, kFewTogether>(block, r, tile, half, x, to());
  for (; r + 2 <= end; r += 2) add_few_rows<U, 2>(block, r, tile, half, x, to());
  if (r < end) add_few_rows<U, 1>(block, r, tile, half, x, to());
}

// Eight tokens of rows [row, row + rows), at most 16: two rows each `step` floats.
inline void store_few(const Matmul& a, int64_t token, int64_t row, int64_t rows, const float* sums, int64_t step) {
  __m512 two[8], four[4], tokens[kFewTokens];
  for (int i = 0; i < 8; i++) two[i] = 2 * i < rows ? _mm512_load_ps(sums + i * step) : _mm512_setzero_ps();
  for (int i = 0; i < 4; i++) four[i] = _mm512_shuffle_ps(two[2 * i], two[2 * i + 1], 0x88);
  transpose_lanes(four, tokens);
  for (int i = 0; i < 4; i++) four[i] = _mm512_shuffle_ps(two[2 * i], two[2 * i + 1], 0xdd);
  transpose_lanes(four, tokens + 4);
  const int64_t there = least(kFewTokens, a.tokens - token);
  if (!a.columns) {
    const __m512 bias = a.bias == nullptr ? _mm512_setzero_ps() : Lanes::load(a.bias + row, rows);
    for (int64_t t = 0; t < there; t++) Lanes::store(y_of(a) + (token + t) * a.y_stride + row, tokens[t] + bias, rows);
    return;
  }
  alignas(64) float turned_back[kFewTokens][16];
  for (int64_t t = 0; t < there; t++) _mm512_store_ps(turned_back[t], tokens[t]);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t t = 0; t < there; t++) y_of(a)[(row + r) * a.y_stride + token + t] = turned_back[t][r];
}

// How a call is cut: pieces of 16 tokens, some of which share a pass over the weights.
struct FewPlan {
  int64_t tiles, pieces, panel_bytes, sums_floats;

  explicit FewPlan(const Matmul& a)
      : tiles(panel_tiles(a)),
        pieces(least(kFewPieces, ceil_div(a.tokens > 0 ? a.tokens : 1, kFewPiece))),
        panel_bytes((kFewRows * tiles * kTileGroups + 16) << few_shift(2)),
        sums_floats(kPanelRows * kFewPiece) {}
  int64_t threads(const Matmul& a) const { return a.threads > 1 ? a.threads : 1; }
  int64_t bytes(const Matmul& a) const { return pieces * (panel_bytes + threads(a) * sums_floats * 4); }
};

// Pieces of tokens from `first` on, packed in `panels`.
struct FewPieces {
  const Matmul& a;
  const FewPlan& plan;
  int64_t first, count;
  char* panels;
  float* sums;

  int64_t token(int64_t piece) const { return first + piece * kFewPiece; }
  int vectors(int64_t piece) const { return a.tokens - token(piece) > kFewTokens ? 2 : 1; }
  char* panel(int64_t piece) const { return panels + piece * plan.panel_bytes; }
  float* sums_of(int64_t piece) const { return sums + piece * plan.sums_floats; }

  // Groups [begin, end) of every piece.
  void pack(int64_t begin, int64_t end) const {
    for (int64_t p = 0; p < count; p++)
      for (int u = 0; u < vectors(p); u++)
        pack_few(a, token(p) + u * kFewTokens, begin, end, panel(p) + u * 64, int64_t{1} << few_shift(vectors(p)));
  }
  // Rows that lie in one block.
  void multiply(const RowChunk& chunk) const {
    const FloatBlock block(static_cast<const char*>(a.weight), chunk.row, a.out_features, a.in_features);
    const int64_t begin = chunk.row - block.first, end = begin + chunk.rows;
    for (int64_t t = 0; t < plan.tiles; t++) {
      const bool half = a.in_features / 4 <= t * kTileGroups + kTileGroups / 2;
      for (int64_t p = 0; p < count; p++) {
        const char* x = panel(p) + ((t * kTileGroups * kFewRows) << few_shift(vectors(p)));
        if (vectors(p) == 2) add_few_chunk<2>(block, begin, end, t, half, x, sums_of(p));
        else add_few_chunk<1>(block, begin, end, t, half, x, sums_of(p));
      }
    }
    for (int64_t p = 0; p < count; p++) store(p, chunk);
  }
  void store(int64_t piece, const RowChunk& chunk) const {
    const int used = vectors(piece);
    for (int64_t r = 0; r < chunk.rows; r += 16)
      for (int u = 0; u < used; u++)
        store_few(a, token(piece) + u * kFewTokens, chunk.row + r, least(16, chunk.rows - r),
                  sums_of(piece) + (r / 2 * used + u) * 16, used * 16);
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
