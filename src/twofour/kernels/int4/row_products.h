// Vectors hold 16 output rows, a dword lane each with four weights as bytes; activations are broadcast, vpdpbusd
// multiplies two planes of bytes. What a weight is, 2:4 or dense, is the template argument W:
//
//   kBlockBytes, kUnsigned (how activations are cut), kFar and kNear (prefetch),
//   add_block(block, x, zero, high, low): one block (32 inputs) of `Halves` times 16 rows against T tokens.
//
// AVX-512 VNNI; internal linkage.
#pragma once

#include "fixed_point.h"
#include "kernels/layouts/int4.h"
#include "native/team.h"

namespace {

using twofour::Int4Unit;
using twofour::kInt4Half;
using twofour::kInt4Rows;
using twofour::kInt4Tile;

constexpr int kRowTokens = 8;
constexpr int64_t kStep = 8;  // inputs that stand together in a piece, 8 high and 8 low bytes a token

// A piece of at most kRowTokens tokens in the workspace: scales, sums of whole numbers [group][token] as floats,
// planes [step][token][8 high, 8 low].
struct Piece {
  int64_t tiles, group_inputs, planes, bytes;
  static constexpr int64_t kTotals = 64;

  explicit Piece(const Matmul& a) {
    tiles = (a.in_features + kInt4Tile - 1) / kInt4Tile;
    group_inputs = (a.group + kInt4Tile - 1) / kInt4Tile * kInt4Tile;
    planes = kTotals + tiles * kRowTokens * 4;
    bytes = planes + tiles * kInt4Tile * kRowTokens * 2;
  }
};

// Unsigned: q + 32768 in two unsigned planes, for weights with a sign. Otherwise two signed planes.
template <bool Unsigned>
void quantize_to_rows(const Matmul& a, const Piece& plan, int64_t first, int64_t tokens, int64_t t, uint8_t* piece) {
  const float scale = scale_of(a, first + t, kSignedLargest);
  reinterpret_cast<float*>(piece)[t] = scale;
  auto* totals = reinterpret_cast<float*>(piece + Piece::kTotals) + t;
  const __m512 inverse = _mm512_set1_ps(1.0f / scale);
  uint8_t* to = piece + plan.planes + t * 16;
  __m512i total = _mm512_setzero_si512();
  for (int64_t k = 0; k < plan.tiles * kInt4Tile; k += 16, to += 2 * tokens * 16) {
    const __m512i q = round_x(a, first + t, k, inverse);
    total = _mm512_add_epi32(total, q);
    const __m512i carried = _mm512_add_epi32(q, _mm512_set1_epi32(Unsigned ? 1 << 15 : 128));
    const __m128i low = _mm512_cvtepi32_epi8(q), high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(carried, 8));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi64(high, low));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + tokens * 16), _mm_unpackhi_epi64(high, low));
    if (!Unsigned && (k + 16) % plan.group_inputs == 0) {
      *totals = static_cast<float>(_mm512_reduce_add_epi32(total));
      totals += kRowTokens;
      total = _mm512_setzero_si512();
    }
  }
}

// Stores one half's rows: sums of q times weights, in tokens' scales.
template <class W, int T>
TWOFOUR_INLINE void store_half(const Matmul& a, const uint8_t* unit, int half, const uint8_t* piece, int64_t first,
                               int64_t row, const __m512 (&sums)[T]) {
  if (row >= a.out_features) return;
  const __m512 total = _mm512_loadu_ps(reinterpret_cast<const float*>(unit) + half * kInt4Half);
  TWOFOUR_UNROLL
  for (int t = 0; t < T; t++) {
    __m512 real = sums[t];  // unsigned planes hold q + 32768: that much of the sum of the row's weights comes off
    if (W::kUnsigned) real = _mm512_fnmadd_ps(_mm512_set1_ps(32768.0f), total, real);
    finish(a, first + t, row, _mm512_mul_ps(real, _mm512_set1_ps(reinterpret_cast<const float*>(piece)[t])));
  }
}

// `Halves` times 16 rows of a unit from half `half` on, all inputs.
template <class W, int T, int Halves, bool Zeros>
TWOFOUR_INLINE void unit_rows(const Matmul& a, const Piece& plan, const Int4Unit& at, const uint8_t* unit, int half,
                              const uint8_t* piece, int64_t first, int64_t row) {
  __m512 sums[Halves][T] = {};
  const uint8_t* block = unit + at.blocks + half * (W::kBlockBytes / 2);
  const uint8_t* x = piece + plan.planes;
  const auto* totals = reinterpret_cast<const float*>(piece + Piece::kTotals);
  for (int64_t g = 0; g < at.groups; g++, totals += kRowTokens) {
    __m512i high[Halves][T] = {}, low[Halves][T] = {}, zero[Halves];
    TWOFOUR_UNROLL
    for (int h = 0; h < Halves; h++)
      zero[h] = Zeros ? load_zeros(unit + at.zeros + g * kInt4Rows + (half + h) * kInt4Half)
                      : _mm512_set1_epi8(twofour::kInt4Offset);
    for (int64_t b = 0; b < at.group_tiles; b++, block += W::kBlockBytes, x += 4 * T * 16)
      W::template add_block<T, Halves>(block, x, zero, high, low);
    TWOFOUR_UNROLL
    for (int h = 0; h < Halves; h++) {
      const __m512 scale = load_scales(unit + at.scales + (g * kInt4Rows + (half + h) * kInt4Half) * 2);
      const __m512 offset = zero_floats(zero[h]);
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) {
        __m512 real = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[h][t], 8), low[h][t]));
        if (!W::kUnsigned) real = _mm512_fnmadd_ps(offset, _mm512_set1_ps(totals[t]), real);
        sums[h][t] = _mm512_fmadd_ps(real, scale, sums[h][t]);
      }
    }
  }
  TWOFOUR_UNROLL
  for (int h = 0; h < Halves; h++)
    store_half<W, T>(a, unit, half + h, piece, first, row + (half + h) * kInt4Half, sums[h]);
}

template <class W, int T, bool Zeros>
TWOFOUR_NOINLINE void units(const Matmul& a, const uint8_t* piece, int64_t first, int64_t u0, int64_t u1) {
  constexpr int Halves = T <= 2 ? 2 : 1;  // registers: 2 sums of whole numbers and one of floats a half and token
  const Piece plan(a);
  const Int4Unit at(a.in_features, a.group, Zeros, W::kBlockBytes);
  for (int64_t u = u0; u < u1; u++) {
    const uint8_t* unit = static_cast<const uint8_t*>(a.weight) + u * at.bytes;
    for (int half = 0; half < 2; half += Halves)
      unit_rows<W, T, Halves, Zeros>(a, plan, at, unit, half, piece, first, u * kInt4Rows);
  }
}

template <class W, int T>
void units_of(int64_t tokens, const Matmul& a, const uint8_t* piece, int64_t first, int64_t u0, int64_t u1) {
  if (tokens == T)
    return a.zeros ? units<W, T, true>(a, piece, first, u0, u1) : units<W, T, false>(a, piece, first, u0, u1);
  if constexpr (T > 1) units_of<W, T - 1>(tokens, a, piece, first, u0, u1);
}

inline int64_t row_products_workspace(const Matmul& a) { return Piece(a).bytes; }

template <class W>
void row_products(const Matmul& a) {
  auto* piece = static_cast<uint8_t*>(a.workspace);
  const Piece plan(a);
  with_team(a.threads, [&](const Team& team) {
    int64_t u0, u1;
    team.share((a.out_features + kInt4Rows - 1) / kInt4Rows, 1, &u0, &u1);
    for (int64_t first = 0; first < a.tokens; first += kRowTokens) {
      const int64_t tokens = a.tokens - first < kRowTokens ? a.tokens - first : kRowTokens;
      if (first > 0) team.barrier();  // the last piece is still being read
      for (int64_t t = team.me; t < tokens; t += team.size)
        quantize_to_rows<W::kUnsigned>(a, plan, first, tokens, t, piece);
      team.barrier();
      units_of<W, kRowTokens>(tokens, a, piece, first, u0, u1);
    }
  });
}

}  // namespace
