// A product on the tile unit: activations are one factor as they are, weights the other, expanded from their packed form
// into L1 right before use. D says what an element is: where the weights of a strip stand (`strip`) and how a step of them is
// expanded, how tiles are multiplied, how a token is copied, and how sums become answers.
// Included once per instruction-set file; everything has internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/layouts/tiles.h"
#include "kernels/matmul.h"
#include "kernels/tile_unit.h"
#include "native/integers.h"
#include "native/team.h"

namespace {

using twofour::kStripRows;
using twofour::kTileBytes;
using twofour::kTileRows;
using twofour::Matmul;

constexpr int64_t kPairTokens = 2 * kTileRows;
constexpr int64_t kPassBytes = 1 << 20;  // activations per pass over the weights: half of L2
constexpr int64_t kStepBytes = 2 * kTileBytes;
constexpr int64_t kSumBytes = 4 * kTileBytes;
// Steps of expanded weights that are kept in L1: for every pair of tokens of a pass, or for one pair alone.
constexpr int64_t kBlockSteps = 8, kRingSteps = 4;
// A step is expanded so many steps ahead of its use, because its stores must have left for L1 before the tile unit loads
// them (49 cycles a tile instead of 35 when they have not).
constexpr int64_t kAhead = 2;
constexpr int64_t kFar = 16384, kNear = 2304;  // packed weights are prefetched so far ahead into L2, into L1

// Tiles 0-3 hold sums, 4-5 activations, 6-7 weights, which always have 16 rows.
inline TileShapes pair_shapes(int64_t rows) {
  TileShapes shapes;
  for (int t = 0; t < 8; t++) {
    shapes.row_bytes[t] = 64;
    shapes.rows[t] = static_cast<uint8_t>(t < 6 ? rows : kTileRows);
  }
  return shapes;
}

// How the tokens are cut: pairs of 16-token tiles, as many per pass over the weights as stay in L2.
template <class D>
struct TilePlan {
  int64_t steps, strips, rows, pairs, pass_pairs, block;
  int64_t x_bytes, thread_at, thread_bytes;  // a thread's scratch: expanded weights, sums of every pair of a pass

  explicit TilePlan(const Matmul& a) {
    steps = ceil_div(a.in_features, D::inputs);
    strips = ceil_div(a.out_features, kStripRows);
    rows = least(a.tokens, kTileRows);
    pairs = ceil_div(a.tokens, kPairTokens);
    const int64_t fit = kPassBytes / (steps * kStepBytes);
    pass_pairs = least(pairs, fit > 0 ? fit : 1);
    block = pass_pairs > 1 ? least(kBlockSteps, steps) : steps;
    x_bytes = pass_pairs * steps * kStepBytes;
    thread_at = x_bytes + D::call_bytes(a);
    // Tokens are copied before weights are expanded: what a token needs meanwhile stands in the same place.
    const int64_t product = kBlockSteps * kStepBytes + pass_pairs * kSumBytes, token = D::token_bytes(a);
    thread_bytes = product > token ? product : token;
  }
  int64_t bytes(int threads) const { return thread_at + threads * thread_bytes; }
};

// The packed weights of a strip, two tiles of D::packed bytes a step, in the order in which they are read.
template <class D>
struct PackedStrip {
  const uint8_t* at;
  TWOFOUR_INLINE void expand(int64_t step, uint8_t* to) const {
    const uint8_t* from = at + step * 2 * D::packed;
    TWOFOUR_UNROLL
    for (int line = 0; line < 2 * D::packed; line += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(from) + kFar + line, _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(from) + kNear + line, _MM_HINT_T0);
    }
    D::expand(from, to);
    D::expand(from + D::packed, to + kTileBytes);
  }
  static PackedStrip of(const uint8_t* weights, int64_t strip, int64_t steps) {
    return {weights + strip * steps * 2 * D::packed};
  }
};

// The four (two) tiles of sums of a strip and two tiles (one tile) of tokens. In memory: [16 rows][tokens][16].
template <int Tiles>
struct Sums {
  static TWOFOUR_INLINE void zero() {
    TileUnit::zero<0>(), TileUnit::zero<1>();
    if constexpr (Tiles == 2) TileUnit::zero<2>(), TileUnit::zero<3>();
  }
  static TWOFOUR_INLINE void load(const uint8_t* sums, int64_t tile_bytes) {
    TileUnit::load<0>(sums), TileUnit::load<1>(sums + Tiles * tile_bytes);
    if constexpr (Tiles == 2) TileUnit::load<2>(sums + tile_bytes), TileUnit::load<3>(sums + 3 * tile_bytes);
  }
  static TWOFOUR_INLINE void store(uint8_t* sums, int64_t tile_bytes) {
    TileUnit::store<0>(sums), TileUnit::store<1>(sums + Tiles * tile_bytes);
    if constexpr (Tiles == 2) TileUnit::store<2>(sums + tile_bytes), TileUnit::store<3>(sums + 3 * tile_bytes);
  }
  template <class D>
  static TWOFOUR_INLINE void add(const uint8_t* x, int64_t tile_bytes, const uint8_t* w) {
    TileUnit::load<4>(x);
    TileUnit::load<6>(w);
    D::template dot<0, 4, 6>();
    TileUnit::load<7>(w + kTileBytes);
    D::template dot<1, 4, 7>();
    if constexpr (Tiles == 2) {
      TileUnit::load<5>(x + tile_bytes);
      D::template dot<2, 5, 6>();
      D::template dot<3, 5, 7>();
    }
  }
};

// Sums over a block of steps whose weights were expanded before: `w` holds step s at s % ring.
template <class D, int Tiles>
TWOFOUR_NOINLINE void add_expanded(const uint8_t* w, const uint8_t* x, int64_t tile_bytes, int64_t steps) {
  for (int64_t s = 0; s < steps; s++)
    Sums<Tiles>::template add<D>(x + s * Tiles * tile_bytes, tile_bytes, w + s * kStepBytes);
}

// The same where they are expanded on the way; ring is a power of two.
template <class D, int Tiles, class Strip>
TWOFOUR_NOINLINE void add_packed(const Strip& packed, int64_t first, uint8_t* w, int64_t ring, const uint8_t* x,
                                 int64_t tile_bytes, int64_t steps) {
  for (int64_t s = 0; s < kAhead && s < steps; s++) packed.expand(first + s, w + s * kStepBytes);
  for (int64_t s = 0; s < steps; s++) {
    Sums<Tiles>::template add<D>(x + s * Tiles * tile_bytes, tile_bytes, w + (s & (ring - 1)) * kStepBytes);
    if (const int64_t next = s + kAhead; next < steps) packed.expand(first + next, w + (next & (ring - 1)) * kStepBytes);
  }
}

// One thread's part of the work.
template <class D>
struct Strips {
  const Matmul& a;
  const TilePlan<D>& plan;
  uint8_t *call, *expanded, *sums;

  Strips(const Matmul& args, const TilePlan<D>& cut, int64_t thread) : a(args), plan(cut) {
    call = static_cast<uint8_t*>(a.workspace);
    expanded = call + plan.thread_at + thread * plan.thread_bytes;
    sums = expanded + kBlockSteps * kStepBytes;
  }

  // One strip for the pairs of tokens from `first` on, a block of steps at a time for all of them.
  void product(int64_t strip, int64_t first, int64_t pairs) const {
    const auto packed = D::strip(a, strip, plan.steps);
    for (int64_t k = 0; k < plan.steps; k += plan.block)
      for (int64_t p = 0; p < pairs; p++) {
        const int64_t token = (first + p) * kPairTokens, tokens = least(kPairTokens, a.tokens - token);
        const bool two = tokens > kTileRows;
        if (two) block<2>(packed, k, p, pairs);
        else block<1>(packed, k, p, pairs);
        if (k + plan.block >= plan.steps)
          D::finish(a, sums + p * kSumBytes, (two ? 2 : 1) * plan.rows, token, tokens, strip * kStripRows,
                    call + plan.x_bytes);
      }
  }

  // The first pair's weights are expanded on the way.
  template <int Tiles, class Strip>
  void block(const Strip& packed, int64_t k, int64_t p, int64_t pairs) const {
    const int64_t steps = least(plan.block, plan.steps - k), tile_bytes = plan.rows * 64;
    const uint8_t* x = call + p * plan.steps * kStepBytes + k * Tiles * tile_bytes;
    uint8_t* at = sums + p * kSumBytes;
    if (k == 0) Sums<Tiles>::zero();
    else Sums<Tiles>::load(at, tile_bytes);
    const int64_t ring = pairs > 1 ? kBlockSteps : kRingSteps;
    if (p == 0) add_packed<D, Tiles>(packed, k, expanded, ring, x, tile_bytes, steps);
    else add_expanded<D, Tiles>(expanded, x, tile_bytes, steps);
    Sums<Tiles>::store(at, tile_bytes);
  }
};

// Tokens of one pair into tiles, [step][tile][row][64 bytes], zero past in_features and past the last token; `own` is the
// thread's scratch.
template <class D>
void copy_pair(const Matmul& a, const TilePlan<D>& plan, int64_t pair, uint8_t* to, uint8_t* call, uint8_t* own) {
  const int64_t first = pair * kPairTokens, tokens = least(kPairTokens, a.tokens - first);
  const int64_t tiles = ceil_div(tokens, kTileRows), stride = tiles * plan.rows * 64;
  for (int64_t t = 0; t < tiles * plan.rows; t++)
    if (t < tokens) D::copy_token(a, first + t, plan.steps, to + t * 64, stride, call, own);
    else
      for (int64_t s = 0; s < plan.steps; s++) _mm512_store_si512(to + s * stride + t * 64, _mm512_setzero_si512());
}

template <class D>
int64_t tile_product_workspace(const Matmul& a) {
  return TilePlan<D>(a).bytes(a.threads);
}

template <class D>
void tile_product(const Matmul& a) {
  if (a.tokens <= 0) return;
  const TilePlan<D> plan(a);
  uint8_t* x = static_cast<uint8_t*>(a.workspace);
  with_team(a.threads, [&](const Team& team) {
    const TileUnit unit(pair_shapes(plan.rows));
    const Strips<D> strips(a, plan, team.me);
    int64_t s0, s1;
    team.share(plan.strips, 1, &s0, &s1);
    for (int64_t first = 0; first < plan.pairs; first += plan.pass_pairs) {
      const int64_t pairs = least(plan.pass_pairs, plan.pairs - first);
      if (first > 0) team.barrier();  // the last tokens are still being read
      for (int64_t p = team.me; p < pairs; p += team.size)
        copy_pair<D>(a, plan, first + p, x + p * plan.steps * kStepBytes, x + plan.x_bytes, strips.expanded);
      team.barrier();
      for (int64_t s = s0; s < s1; s++) strips.product(s, first, pairs);
    }
  });
}

}  // namespace
