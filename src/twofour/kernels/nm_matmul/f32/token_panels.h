// Design A, token-vectorised: vectors hold tokens, a kept weight is one broadcast and one address.
//
// x is transposed into panels P[k][tokens], so the 2-bit index of a kept weight selects a panel row by its address and
// the load port does the permuting: acc[row] += broadcast(w) * P[k]. Zeros cost nothing and nothing is shuffled.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/panel_steps.h"
#include "panels.h"

namespace {

TWOFOUR_INLINE int64_t panel_steps(const Matmul& a) { return (a.in_features + kStep - 1) / kStep; }

using FloatBlock = PanelBlock<4, const char>;

// Tiles [t0, t1) of R rows from `row` on. The sums of these tiles are formed on their own and added to `y` at the end:
// a chain is at most one L1 pass long, which keeps the rounding error near that of a blocked dense product.
template <class V, int U, int R>
TWOFOUR_INLINE void add_rows(const FloatBlock& block, int64_t row, int64_t t0, int64_t t1, int64_t steps,
                             const float* panel, float* y) {
  constexpr int64_t stride = panel_stride(U) * V::width * 4;
  typename V::reg acc[R][U];
  TWOFOUR_UNROLL
  for (int r = 0; r < R; r++) {
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) acc[r][u] = V::zero();
  }
  const char* x = reinterpret_cast<const char*>(panel) + t0 * kPanelTile * stride;
  for (int64_t t = t0; t < t1; t++) {
    uint64_t meta[R];
    std::memcpy(meta, block.meta(t, row), sizeof(meta));
    RowsTogether values{reinterpret_cast<const float*>(block.values(t, row))};
    for (int64_t s = least(kPanelTile / kStep, steps - t * (kPanelTile / kStep)); s > 0; s--) {
      add_step<V, U, R>(values, x, meta, acc);
      for (int r = 0; r < R; r++) meta[r] >>= 2 * kStep / 2;
      values.first += kStep / 2;
      x += kStep * stride;
    }
  }
  TWOFOUR_UNROLL
  for (int r = 0; r < R; r++) {
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) {
      float* at = y + (r * panel_stride(U) + u) * V::width;
      V::store_aligned(at, t0 == 0 ? acc[r][u] : acc[r][u] + V::load_aligned(at));
    }
  }
}

struct BlockWeights {
  static constexpr int64_t grain = 16;  // rows; a member's share starts at a multiple

  template <class V, int U>
  TWOFOUR_NOINLINE static void add(const RowChunk& chunk, int64_t t0, int64_t t1, TransposePipeline<V>* pipeline) {
    constexpr int R = panel_rows<V>(panel_stride(U));
    constexpr int64_t stride = panel_stride(U) * V::width;
    const Matmul& a = pipeline->a;
    const FloatBlock block(static_cast<const char*>(a.weight), chunk.row, a.out_features, a.in_features);
    const int64_t steps = panel_steps(a), first = chunk.row % kPanelRows, end = first + chunk.rows;
    const float* panel = pipeline->panel.panel;
    float* y = pipeline->panel.sums;
    int64_t row = first;
    for (; row + R <= end; row += R, y += R * stride) {
      const int64_t done = row - first;
      if (pipeline->rows > 0 && done > 0 && done % kStoreRows == 0) pipeline->enqueue_store(done);
      add_rows<V, U, R>(block, row, t0, t1, steps, panel, y);
      pipeline->step();
    }
    for (; row < end; row++, y += stride) add_rows<V, U, 1>(block, row, t0, t1, steps, panel, y);
  }
};

}  // namespace
