// Weights expanded into AMX tiles: each 16 rows x 4 inputs of a 2:4 weight become one line of a tile of whole numbers,
// zeros included, which serves every token at once; the tile unit multiplies 16 tokens in the time the expansion takes.
//
// Per line of 64 dense values: a shift, a look-up of the codes' byte shuffle (vpermd), an or, the shuffle (vpshufb) and
// a store. Internal linkage.
#pragma once

#include "fixed_point.h"
#include "kernels/layouts/int4.h"
#include "kernels/tile_unit.h"
#include "native/team.h"

namespace {

using twofour::Int4Unit;
using twofour::kInt4Half;
using twofour::kInt4Rows;
using twofour::kInt4Tile;

constexpr int kTileTokens = 8;  // two planes of bytes each: the 16 rows of a tile
constexpr int64_t kLinesBytes = 1024;
constexpr int64_t kSlotBytes = 2 * kLinesBytes;  // the lines of a step; there are two, one filled, one read

// Tiles 0, 1: sums of both halves in even groups, 2, 3: in odd ones; 4: tokens; 5, 6: weights of both halves.
inline TileShapes piece_shapes(int64_t tokens, int64_t inputs) {
  TileShapes shapes;
  for (int i = 0; i < 8; i++) {
    shapes.row_bytes[i] = static_cast<uint16_t>(i == 4 ? inputs : 64);
    shapes.rows[i] = static_cast<uint8_t>(i < 5 ? 2 * tokens : inputs / 4);
  }
  return shapes;
}

// The products of one group of inputs in tiles `first` and the next, sums started and stored where it is the first and last
// of its scale.
template <class W, int first>
TWOFOUR_INLINE void multiply_group(bool starts, bool ends, int32_t* to) {
  if (starts) {
    TileUnit::zero<first>();
    TileUnit::zero<first + 1>();
  }
  W::template dot<first, 4, 5>();
  W::template dot<first + 1, 4, 6>();
  if (ends) {
    TileUnit::store<first>(to);
    TileUnit::store<first + 1>(to + 256);
  }
}

// Into L1 from `near` bytes ahead, into L2 from `far`. As assembly: gcc 12 gathers the intrinsics of a whole step in
// one place, which made 1 token with weights from DRAM 18 % slower.
template <int64_t near, int64_t far>
TWOFOUR_INLINE void prefetch(const uint8_t* at) {
  asm volatile("prefetcht1 %0" ::"m"(at[far]));
  asm volatile("prefetcht0 %0" ::"m"(at[near]));
}

// Where things are in the workspace: one piece of tokens that all threads read, then sums and tiles of each thread.
struct PiecePlan {
  int64_t inputs;  // of a tile: 64, or 32 where a group is 32
  int64_t steps, group_steps;
  int64_t totals, planes, piece_bytes;
  static constexpr int64_t kSums = kTileTokens * kInt4Rows * 4;
  static constexpr int64_t kThreadBytes = kSums + 4 * kLinesBytes + 2 * kSlotBytes;

  explicit PiecePlan(const Matmul& a) {
    inputs = a.group % 64 == 0 ? 64 : 32;
    steps = (a.in_features + inputs - 1) / inputs;
    group_steps = a.group / inputs;
    totals = 64;  // floats [group][token], the sums of each token's inputs, for weights that keep zero points
    planes = totals + steps * kTileTokens * 4;
    piece_bytes = planes + steps * 2 * kTileTokens * inputs;
  }
};

// q = 256 * high + low, both signed: [step][plane][token][inputs].
inline void quantize_to_tiles(const Matmul& a, const PiecePlan& plan, int64_t first, int64_t tokens, int64_t t,
                              uint8_t* piece) {
  const float scale = scale_of<Lanes>(a, first + t, kSignedLargest);
  reinterpret_cast<float*>(piece)[t] = scale;
  const __m512 inverse = _mm512_set1_ps(1.0f / scale);
  auto* totals = reinterpret_cast<float*>(piece + plan.totals);
  __m512i total = _mm512_setzero_si512();
  for (int64_t s = 0; s < plan.steps; s++) {
    uint8_t* to = piece + plan.planes + (s * 2 * tokens + t) * plan.inputs;
    for (int64_t i = 0; i < plan.inputs; i += 16) {
      const __m512i q = round_x<WholeLanes>(a, first + t, s * plan.inputs + i, inverse);
      const __m512i up = _mm512_add_epi32(q, _mm512_set1_epi32(128));
      total = _mm512_add_epi32(total, q);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(_mm512_srai_epi32(up, 8)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + tokens * plan.inputs + i), _mm512_cvtepi32_epi8(q));
    }
    if ((s + 1) % plan.group_steps == 0) {
      totals[s / plan.group_steps * kTileTokens + t] = static_cast<float>(_mm512_reduce_add_epi32(total));
      total = _mm512_setzero_si512();
    }
  }
}

// Adds one group's sums of whole numbers, scaled, to the sums of a half: [token][16].
template <bool Offset>
TWOFOUR_INLINE void add_scaled(const int32_t* high, const int32_t* low, __m512 scale, __m512 zero, const float* totals,
                               int64_t tokens, float* sums) {
  for (int64_t t = 0; t < tokens; t++) {
    const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(high + t * 16), 8),
                                           _mm512_load_si512(low + t * 16));
    __m512 real = _mm512_cvtepi32_ps(whole);
    if (Offset) real = _mm512_fnmadd_ps(zero, _mm512_set1_ps(totals[t]), real);
    _mm512_store_ps(sums + t * kInt4Rows, _mm512_fmadd_ps(real, scale, _mm512_load_ps(sums + t * kInt4Rows)));
  }
}

inline void store_unit(const Matmul& a, const uint8_t* piece, const float* sums, int64_t first, int64_t tokens,
                       int64_t row) {
  for (int64_t h = 0; h < 2; h++) {
    const int64_t m = row + h * kInt4Half;
    if (m >= a.out_features) continue;
    for (int64_t t = 0; t < tokens; t++) {
      const __m512 scale = _mm512_set1_ps(reinterpret_cast<const float*>(piece)[t]);
      finish<Lanes>(a, first + t, m, _mm512_mul_ps(_mm512_load_ps(sums + t * kInt4Rows + h * kInt4Half), scale));
    }
  }
}

// One unit against a piece of tokens, as three loops that lag behind each other: lines are expanded, the lines of the
// step before are multiplied, sums of the group before that are scaled: so no tile is loaded from lines just stored, no
// sum just stored is read.
//
// W says what a weight is: its block, how a half of it becomes tile lines, and the signs in the products. Steps are
// counted within their group: dividing their number by the group's steps cost 7 % of the time.
template <class W, bool Zeros, int Inputs>
struct PieceProduct {
  const PiecePlan& plan;
  const Int4Unit& at;
  const uint8_t* unit;
  const uint8_t* piece;
  int64_t tokens;
  float* sums;
  int32_t* whole;
  uint8_t* lines;
  const uint8_t* block;
  const uint8_t* x;
  __m512i zero[2];
  int64_t expanded_steps, expanded_group, steps, group;  // steps: of the group, done so far
  int64_t to, from;                                      // slots of lines, in bytes

  TWOFOUR_INLINE void expand() {
    if (expanded_steps == 0) {
      for (int h = 0; h < 2; h++) zero[h] = zeros_of(expanded_group, h);
    }
    TWOFOUR_UNROLL
    for (int i = 0; i < Inputs; i += kInt4Tile, block += W::kBlockBytes) {
      TWOFOUR_UNROLL
      for (int h = 0; h < 2; h++)
        W::expand(block + h * W::kBlockBytes / 2, zero[h], lines + to + h * kLinesBytes + i * 16);
    }
    to ^= kSlotBytes;
    if (++expanded_steps == plan.group_steps) expanded_steps = 0, expanded_group++;
  }

  TWOFOUR_INLINE void multiply() {
    const bool starts = steps == 0, ends = ++steps == plan.group_steps;
    TileUnit::load<4>(x, Inputs);
    TileUnit::load<5>(lines + from);
    TileUnit::load<6>(lines + from + kLinesBytes);
    if (group % 2 == 0)
      multiply_group<W, 0>(starts, ends, whole);
    else
      multiply_group<W, 2>(starts, ends, whole + 2 * 256);
    x += 2 * tokens * Inputs;
    from ^= kSlotBytes;
    if (!ends) return;
    if (group > 0) scale(group - 1);
    group++;
    steps = 0;
  }

  TWOFOUR_INLINE void scale(int64_t group) {
    const int32_t* from = whole + group % 2 * 2 * 256;
    const auto* totals = reinterpret_cast<const float*>(piece + plan.totals) + group * kTileTokens;
    for (int h = 0; h < 2; h++) {
      const __m512 scales = load_scales<Lanes>(unit + at.scales + (group * kInt4Rows + h * kInt4Half) * 2);
      const __m512 offset = W::kOffset ? zero_floats<WholeLanes>(zeros_of(group, h)) : _mm512_setzero_ps();
      add_scaled<W::kOffset>(from + h * 256, from + h * 256 + tokens * 16, scales, offset, totals, tokens,
                             sums + h * kInt4Half);
    }
  }

  TWOFOUR_INLINE __m512i zeros_of(int64_t group, int h) const {
    return Zeros ? load_zeros<WholeLanes>(unit + at.zeros + group * kInt4Rows + h * kInt4Half)
                 : _mm512_set1_epi8(twofour::kInt4Offset);
  }
};

template <class W, bool Zeros, int Inputs>
TWOFOUR_NOINLINE void tile_units(const Matmul& a, const PiecePlan& plan, const uint8_t* piece, uint8_t* own,
                                 int64_t first, int64_t tokens, int64_t u0, int64_t u1) {
  const Int4Unit at(a.in_features, a.group, Zeros, W::kBlockBytes);
  auto* sums = reinterpret_cast<float*>(own);
  auto* whole = reinterpret_cast<int32_t*>(own + PiecePlan::kSums);
  uint8_t* lines = own + PiecePlan::kSums + 4 * kLinesBytes;
  for (int64_t u = u0; u < u1; u++) {
    const uint8_t* weight = static_cast<const uint8_t*>(a.weight) + u * at.bytes;
    PieceProduct<W, Zeros, Inputs> unit{plan,  at,    weight, piece, tokens, sums, whole, lines, weight + at.blocks,
                                        piece + plan.planes, {}, 0, 0, 0, 0, 0, 0};
    for (int64_t i = 0; i < tokens * kInt4Rows; i += 16) _mm512_store_ps(sums + i, _mm512_setzero_ps());
    unit.expand();
    for (int64_t step = 1; step < plan.steps; step++) {
      unit.expand();
      unit.multiply();
    }
    unit.multiply();
    unit.scale(at.groups - 1);
    store_unit(a, piece, sums, first, tokens, u * kInt4Rows);
  }
}

template <class W>
void tile_units_of(const Matmul& a, const PiecePlan& plan, const uint8_t* piece, uint8_t* own, int64_t first,
                   int64_t tokens, int64_t u0, int64_t u1) {
  if (a.zeros && plan.inputs == 64) return tile_units<W, true, 64>(a, plan, piece, own, first, tokens, u0, u1);
  if (a.zeros) return tile_units<W, true, 32>(a, plan, piece, own, first, tokens, u0, u1);
  if (plan.inputs == 64) return tile_units<W, false, 64>(a, plan, piece, own, first, tokens, u0, u1);
  tile_units<W, false, 32>(a, plan, piece, own, first, tokens, u0, u1);
}

inline int64_t piece_product_workspace(const Matmul& a) {
  return PiecePlan(a).piece_bytes + 64 + (a.threads > 1 ? a.threads : 1) * PiecePlan::kThreadBytes;
}

template <class W>
void piece_product(const Matmul& a) {
  const PiecePlan plan(a);
  auto* piece = static_cast<uint8_t*>(a.workspace);
  with_team(a.threads, [&](const Team& team) {
    uint8_t* own = piece + (plan.piece_bytes + 63) / 64 * 64 + team.me * PiecePlan::kThreadBytes;
    int64_t u0, u1;
    team.share((a.out_features + kInt4Rows - 1) / kInt4Rows, 1, &u0, &u1);
    for (int64_t first = 0; first < a.tokens; first += kTileTokens) {
      const int64_t tokens = a.tokens - first < kTileTokens ? a.tokens - first : kTileTokens;
      if (first > 0) team.barrier();  // the last piece is still being read
      for (int64_t t = team.me; t < tokens; t += team.size) quantize_to_tiles(a, plan, first, tokens, t, piece);
      team.barrier();
      const TileUnit unit(piece_shapes(tokens, plan.inputs));
      tile_units_of<W>(a, plan, piece, own, first, tokens, u0, u1);
    }
  });
}

}  // namespace
