// Vectors hold output rows, a dword lane each with four weights as bytes; activations are broadcast, vpdpbusd
// multiplies two planes of bytes. What a weight is, 2:4 or dense, is the template argument W:
//
//   V, kBlockBytes, kUnsigned (how activations are cut), kTimes<Zeros>: the weights are so many times what they mean,
//   add_block(block, x, zero, high, low): one block (32 inputs) of N vectors of rows against T tokens; `block` is where
//   the first vector's dwords begin,
//   fetch(line): asks for what stands one distance behind that line, and for what stands another one.
//
// For sets with VNNI; internal linkage.
#pragma once

#include "fixed_point.h"
#include "kernels/layouts/int4.h"
#include "kernels/row_shape.h"
#include "native/team.h"

namespace {

using twofour::Int4Unit;
using twofour::kInt4Half;
using twofour::kInt4Rows;
using twofour::kInt4Tile;

constexpr int64_t kStep = 8;  // inputs that stand together in a piece, 8 high and 8 low bytes a token

// A piece of at most kRowTokens tokens in the workspace: scales, sums of whole numbers [group][token] as floats,
// planes [step][token][8 high, 8 low].
template <class V>
struct Piece {
  int64_t tiles, group_inputs, planes, bytes;
  static constexpr int64_t kTotals = 64;

  explicit Piece(const Matmul& a) {
    tiles = (a.in_features + kInt4Tile - 1) / kInt4Tile;
    group_inputs = (a.group + kInt4Tile - 1) / kInt4Tile * kInt4Tile;
    planes = kTotals + tiles * kRowTokens<V> * 4;
    bytes = planes + tiles * kInt4Tile * kRowTokens<V> * 2;
  }
};

// Unsigned: q + 32768 in two unsigned planes, for weights with a sign. Otherwise two signed planes.
template <class V, bool Unsigned>
void quantize_to_rows(const Matmul& a, const Piece<V>& plan, int64_t first, int64_t tokens, int64_t t, uint8_t* piece) {
  const float scale = scale_of<V>(a, first + t, kSignedLargest);
  reinterpret_cast<float*>(piece)[t] = scale;
  auto* totals = reinterpret_cast<float*>(piece + Piece<V>::kTotals) + t;
  const auto inverse = V::all(1.0f / scale);
  uint8_t* to = piece + plan.planes + t * 2 * kStep;
  typename V::U total{};  // wraps in a token with a NaN, whose values round to the least int32: its scale is NaN
  for (int64_t k = 0; k < plan.tiles * kInt4Tile; k += V::width) {
    const auto q = (typename V::I)round_x<V>(a, first + t, k, inverse);
    total += (typename V::U)q;
    V::store_x((typename V::ints)((q + (Unsigned ? 1 << 15 : 128)) >> 8), to, k, tokens * 2 * kStep);
    V::store_x((typename V::ints)q, to + kStep, k, tokens * 2 * kStep);
    if (!Unsigned && (k + V::width) % plan.group_inputs == 0) {
      uint32_t sum = 0;
      for (int i = 0; i < V::width; i++) sum += total[i];
      *totals = static_cast<float>(static_cast<int32_t>(sum));
      totals += kRowTokens<V>;
      total = typename V::U{};
    }
  }
}

// Stores one vector of rows: sums of q times weights, in tokens' scales; `lane` is the first row's in the unit.
template <class W, int T, bool Zeros>
TWOFOUR_INLINE void store_rows(const Matmul& a, const uint8_t* unit, int lane, const uint8_t* piece, int64_t first,
                               int64_t row, const typename W::V::reg (&sums)[T]) {
  using V = typename W::V;
  if (row >= a.out_features) return;
  const auto total = V::load_unaligned(reinterpret_cast<const float*>(unit) + lane);
  TWOFOUR_UNROLL
  for (int t = 0; t < T; t++) {
    auto real = sums[t] * V::all(1.0f / W::template kTimes<Zeros>);  // a power of two: exact
    // Unsigned planes hold q + 32768: that much of the sum of the row's weights comes off.
    if (W::kUnsigned) real = V::fma(V::all(-32768.0f), total, real);
    finish<V>(a, first + t, row, real * V::all(reinterpret_cast<const float*>(piece)[t]));
  }
}

// Where the dwords of lane `lane` of a unit begin in a block.
template <class W>
constexpr int64_t lane_bytes(int64_t lane) {
  return lane / kInt4Half * (W::kBlockBytes / 2) + lane % kInt4Half * 4;
}

// The head of a unit, its scales above all, is fetched ahead as the blocks are: where units stand one behind the other, what
// is one distance behind the blocks is all but what is that far behind heads. Left out, each head waited for memory in the
// midst of a stream (Zen 4, 768 inputs, 7 to 9 % of a unit: 21 GB/s instead of 29). Two lines for each block: a quarter of
// a group's stream or more, so that they are asked for before the stream is there.
template <class W>
TWOFOUR_INLINE void fetch_head(const Int4Unit& at, const uint8_t* unit, int64_t block) {
  for (int64_t line = 128 * block; line < least(128 * block + 128, at.blocks); line += 64) W::fetch(unit + line);
}

// N vectors of rows of a unit from lane `lane` on, all inputs.
template <class W, int T, int N, bool Zeros>
TWOFOUR_INLINE void unit_rows(const Matmul& a, const Piece<typename W::V>& plan, const Int4Unit& at, const uint8_t* unit,
                              int lane, const uint8_t* piece, int64_t first, int64_t row) {
  using V = typename W::V;
  typename V::reg sums[N][T] = {};
  const uint8_t* block = unit + at.blocks + lane_bytes<W>(lane);
  const uint8_t* x = piece + plan.planes;
  const auto* totals = reinterpret_cast<const float*>(piece + Piece<V>::kTotals);
  for (int64_t g = 0; g < at.groups; g++, totals += kRowTokens<V>) {
    typename V::ints high[N][T] = {}, low[N][T] = {}, zero[N];
    const int64_t of_group = g * kInt4Rows + lane;
    TWOFOUR_UNROLL
    for (int v = 0; v < N; v++)
      zero[v] = Zeros ? load_zeros<V>(unit + at.zeros + of_group + v * V::width)
                      : (typename V::ints)(typename V::U{} + 0x01010101u * twofour::kInt4Offset);
    for (int64_t b = 0; b < at.group_tiles; b++, block += W::kBlockBytes, x += 4 * T * 2 * kStep) {
      if (lane == 0) fetch_head<W>(at, unit, g * at.group_tiles + b);
      W::template add_block<T, N, Zeros>(block, x, zero, high, low);
    }
    TWOFOUR_UNROLL
    for (int v = 0; v < N; v++) {
      const auto scale = load_scales<V>(unit + at.scales + (of_group + v * V::width) * 2);
      const auto offset = zero_floats<V>(zero[v]);
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) {
        auto real = V::to_real((typename V::ints)(((typename V::U)high[v][t] << 8) + (typename V::U)low[v][t]));
        if (!W::kUnsigned) real = V::fma(offset, V::all(-totals[t]), real);
        sums[v][t] = V::fma(real, scale, sums[v][t]);
      }
    }
  }
  TWOFOUR_UNROLL
  for (int v = 0; v < N; v++)
    store_rows<W, T, Zeros>(a, unit, lane + v * V::width, piece, first, row + lane + v * V::width, sums[v]);
}

template <class W, int T, bool Zeros>
TWOFOUR_NOINLINE void units(const Matmul& a, const uint8_t* piece, int64_t first, int64_t u0, int64_t u1) {
  constexpr int N = T <= 2 ? 2 : 1;  // registers: 2 sums of whole numbers and one of floats a vector and token
  constexpr int lanes = N * W::V::width;
  const Piece<typename W::V> plan(a);
  const Int4Unit at(a.in_features, a.group, Zeros, W::kBlockBytes);
  for (int64_t u = u0; u < u1; u++) {
    const uint8_t* unit = static_cast<const uint8_t*>(a.weight) + u * at.bytes;
    for (int lane = 0; lane < kInt4Rows; lane += lanes)
      unit_rows<W, T, N, Zeros>(a, plan, at, unit, lane, piece, first, u * kInt4Rows);
  }
}

template <class W, int T>
void units_of(int64_t tokens, const Matmul& a, const uint8_t* piece, int64_t first, int64_t u0, int64_t u1) {
  if (tokens == T)
    return a.zeros ? units<W, T, true>(a, piece, first, u0, u1) : units<W, T, false>(a, piece, first, u0, u1);
  if constexpr (T > 1) units_of<W, T - 1>(tokens, a, piece, first, u0, u1);
}

template <class W>
int64_t row_products_workspace(const Matmul& a) {
  return Piece<typename W::V>(a).bytes;
}

template <class W>
void row_products(const Matmul& a) {
  using V = typename W::V;
  auto* piece = static_cast<uint8_t*>(a.workspace);
  const Piece<V> plan(a);
  with_team(a.threads, [&](const Team& team) {
    int64_t u0, u1;
    team.share((a.out_features + kInt4Rows - 1) / kInt4Rows, 1, &u0, &u1);
    for (int64_t first = 0; first < a.tokens; first += kRowTokens<V>) {
      const int64_t tokens = least(a.tokens - first, kRowTokens<V>);
      if (first > 0) team.barrier();  // the last piece is still being read
      for (int64_t t = team.me; t < tokens; t += team.size)
        quantize_to_rows<V, W::kUnsigned>(a, plan, first, tokens, t, piece);
      team.barrier();
      units_of<W, kRowTokens<V>>(tokens, a, piece, first, u0, u1);
    }
  });
}

}  // namespace
