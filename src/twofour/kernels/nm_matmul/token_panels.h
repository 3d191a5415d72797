// Design A, token-vectorised: vectors hold tokens, a kept weight is one broadcast and one address.
//
// x is transposed into panels P[k][tokens], so the 2-bit index of a kept weight selects a panel row by its address and
// the load port does the permuting: acc[row] += broadcast(w) * P[k]. Zeros cost nothing and nothing is shuffled.
// Included once per instruction-set file, with V the vector type of that file; everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "compiler.h"
#include "layout.h"
#include "nm_matmul.h"
#include "team.h"

namespace {

using twofour::kPanelRows;
using twofour::kPanelTile;
using twofour::NmMatmul;

constexpr int64_t kStep = 16;              // inputs per unrolled step: 8 kept weights, 16 bits of metadata
constexpr int64_t kPanelL1Bytes = 32768;   // panel bytes one pass over the rows keeps in L1 (32 to 48 KB)

inline int64_t panel_steps(const NmMatmul& a) { return (a.in_features + kStep - 1) / kStep; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline float* floats_at(void* base, int64_t bytes) { return reinterpret_cast<float*>(static_cast<char*>(base) + bytes); }

// Vectors between two panel rows for a panel that uses `used` of them: the next power of two, so that the metadata
// becomes an address with one shift and one mask.
constexpr int panel_stride(int used) { return used <= 1 ? 1 : used <= 2 ? 2 : used <= 4 ? 4 : 8; }
// Rows whose sums fill the registers meant for them; four keep enough independent chains for the narrow panels.
template <class V>
constexpr int panel_rows(int stride) {
  return V::panel_sums / stride < 4 ? V::panel_sums / stride : 4;
}
constexpr int log2_of(int64_t n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

// A block of at most kPanelRows rows in the packed bytes.
struct PanelBlock {
  const char* tiles;
  int64_t rows, meta_bytes, tile_bytes;

  // The block that holds `row`.
  PanelBlock(const NmMatmul& a, int64_t row) {
    const int64_t first_row = row / kPanelRows * kPanelRows;
    const int64_t count = (a.in_features + kPanelTile - 1) / kPanelTile;
    const int64_t full_tile = kPanelRows * (8 + kPanelTile * 2);
    tiles = static_cast<const char*>(a.weight) + first_row / kPanelRows * count * full_tile;
    rows = smaller(kPanelRows, a.out_features - first_row / kPanelRows * kPanelRows);
    meta_bytes = (rows * 8 + 63) / 64 * 64;
    tile_bytes = meta_bytes + rows * kPanelTile * 2;
  }
  const char* meta(int64_t tile, int64_t row) const { return tiles + tile * tile_bytes + row * 8; }
  const float* values(int64_t tile, int64_t row) const {
    return reinterpret_cast<const float*>(tiles + tile * tile_bytes + meta_bytes) + row * (kPanelTile / 2);
  }
};

// 16 inputs of R rows: 8 kept weights each, against U vectors of tokens.
template <class V, int U, int R>
TWOFOUR_INLINE void add_step(const float* values, const char* x, const uint64_t (&meta)[R],
                             typename V::reg (&acc)[R][U]) {
  constexpr int64_t stride = panel_stride(U) * V::width * 4;
  constexpr int shift = log2_of(stride);
  TWOFOUR_UNROLL
  for (int n = 0; n < 8; n++) {
    TWOFOUR_UNROLL
    for (int r = 0; r < R; r++) {
      const uint64_t bits = 2 * n < shift ? meta[r] << (shift - 2 * n) : meta[r] >> (2 * n - shift);
      const char* row = x + (bits & (uint64_t{3} << shift)) + n / 2 * 4 * stride;
      const typename V::reg w = V::broadcast(values + r * (kPanelTile / 2) + n);
      TWOFOUR_UNROLL
      for (int u = 0; u < U; u++) acc[r][u] = V::fma(w, reinterpret_cast<const float*>(row) + u * V::width, acc[r][u]);
    }
  }
}

// Tiles [t0, t1) of R rows from `row` on. The sums of these tiles are formed on their own and added to `y` at the end:
// a chain is at most one L1 pass long, which keeps the rounding error near that of a blocked dense product.
template <class V, int U, int R>
TWOFOUR_INLINE void add_rows(const PanelBlock& block, int64_t row, int64_t t0, int64_t t1, int64_t steps,
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
    const float* values = block.values(t, row);
    for (int64_t s = smaller(kPanelTile / kStep, steps - t * (kPanelTile / kStep)); s > 0; s--) {
      add_step<V, U, R>(values, x, meta, acc);
      for (int r = 0; r < R; r++) meta[r] >>= 2 * kStep / 2;
      values += kStep / 2;
      x += kStep * stride;
    }
  }
  TWOFOUR_UNROLL
  for (int r = 0; r < R; r++) {
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) {
      float* at = y + (r * panel_stride(U) + u) * V::width;
      V::store(at, t0 == 0 ? acc[r][u] : V::add(acc[r][u], V::load(at)));
    }
  }
}

// Rows [r0, r1) of a block through tiles [t0, t1); y[row - r0][tokens] has the panel's stride.
template <class V, int U>
TWOFOUR_NOINLINE void add_tiles(const PanelBlock& block, int64_t r0, int64_t r1, int64_t t0, int64_t t1, int64_t steps,
                                const float* panel, float* y) {
  constexpr int R = panel_rows<V>(panel_stride(U));
  constexpr int64_t stride = panel_stride(U) * V::width;
  int64_t row = r0;
  for (; row + R <= r1; row += R, y += R * stride) add_rows<V, U, R>(block, row, t0, t1, steps, panel, y);
  for (; row < r1; row++, y += stride) add_rows<V, U, 1>(block, row, t0, t1, steps, panel, y);
}

// The same for a panel that uses `used` <= U vectors.
template <class V, int U>
void add_tiles_of(int used, const PanelBlock& block, int64_t r0, int64_t r1, int64_t t0, int64_t t1, int64_t steps,
                  const float* panel, float* y) {
  if (used == U) return add_tiles<V, U>(block, r0, r1, t0, t1, steps, panel, y);
  if constexpr (U > 1) add_tiles_of<V, U - 1>(used, block, r0, r1, t0, t1, steps, panel, y);
}

// x[first token.., k0..k1) -> panel[k][tokens]; tokens and inputs past the end become zero.
template <class V>
void pack_panel(const NmMatmul& a, int64_t first, int used, int64_t k0, int64_t k1, float* panel) {
  const int64_t stride = panel_stride(used) * V::width;
  for (int u = 0; u < used; u++) {
    const int64_t token = first + u * V::width;
    const int64_t tokens = smaller(V::width, a.tokens - token);
    for (int64_t k = k0; k < k1; k += V::width) {
      const int64_t have = smaller(V::width, a.in_features - k);
      typename V::reg t[V::width];
      for (int i = 0; i < V::width; i++) {
        if (i >= tokens || have <= 0) t[i] = V::zero();
        else if (have == V::width) t[i] = V::load_unaligned(a.x + (token + i) * a.x_stride + k);
        else t[i] = V::load_partial(a.x + (token + i) * a.x_stride + k, have);
      }
      V::transpose(t);
      for (int i = 0; i < V::width; i++) V::store(panel + (k + i) * stride + u * V::width, t[i]);
    }
  }
}

// sums[row][tokens] of rows [m0, m1) -> y[token][row], bias added.
template <class V>
void unpack_sums(const NmMatmul& a, int64_t first, int used, int64_t m0, int64_t m1, const float* sums) {
  const int64_t stride = panel_stride(used) * V::width;
  for (int64_t m = m0; m < m1; m += V::width) {
    const int64_t rows = smaller(V::width, m1 - m);
    const typename V::reg bias = a.bias == nullptr ? V::zero() : V::load_partial(a.bias + m, rows);
    for (int u = 0; u < used; u++) {
      const int64_t token = first + u * V::width;
      const int64_t tokens = smaller(V::width, a.tokens - token);
      typename V::reg t[V::width];
      for (int i = 0; i < V::width; i++)
        t[i] = i < rows ? V::load(sums + (m - m0 + i) * stride + u * V::width) : V::zero();
      V::transpose(t);
      for (int64_t i = 0; i < tokens; i++) {
        float* to = a.y + (token + i) * a.y_stride + m;
        if (rows == V::width) V::store_unaligned(to, V::add(t[i], bias));
        else V::store_partial(to, V::add(t[i], bias), rows);
      }
    }
  }
}

// How a call is cut: panels of up to `Wide` vectors of tokens, `Group` panels per pass over the weights.
template <class V, int Wide, int Group>
struct PanelPlan {
  static constexpr int wide = Wide;
  static constexpr int64_t panel_tokens = Wide * V::width;
  int64_t group, panel_floats, sums_floats;
  static constexpr int64_t round16(int64_t n) { return (n + 15) / 16 * 16; }

  explicit PanelPlan(const NmMatmul& a) {
    const int64_t panels = (a.tokens + panel_tokens - 1) / panel_tokens;
    group = smaller(Group, panels);
    const int64_t stride = panel_stride(used(a, 0)) * V::width;
    panel_floats = round16(panel_steps(a) * kStep * stride);
    sums_floats = round16(smaller(kPanelRows, a.out_features) * stride);
  }
  int used(const NmMatmul& a, int64_t panel) const {
    const int64_t left = a.tokens - panel * panel_tokens;
    return static_cast<int>(left >= panel_tokens ? Wide : (left + V::width - 1) / V::width);
  }
  int64_t bytes(const NmMatmul& a) const {
    return group * 4 * (panel_floats + (a.threads > 1 ? a.threads : 1) * sums_floats);
  }
};

// One group of panels, packed: this member's rows of the whole output, block by block, in L1-sized passes.
template <class V, class Plan>
void multiply_group(const NmMatmul& a, const Plan& plan, const Team& team, int64_t p0, int64_t p1) {
  const float* panels = static_cast<const float*>(a.workspace);
  float* sums = floats_at(a.workspace, plan.group * 4 * (plan.panel_floats + team.me * plan.sums_floats));
  const int64_t steps = panel_steps(a), tiles = (a.in_features + kPanelTile - 1) / kPanelTile;
  const int64_t row_bytes = panel_stride(plan.used(a, p0)) * V::width * 4;
  const int64_t pass = kPanelL1Bytes / (kPanelTile * row_bytes) > 0 ? kPanelL1Bytes / (kPanelTile * row_bytes) : 1;
  int64_t begin, end;
  team.share(a.out_features, 16, &begin, &end);
  for (int64_t m = begin; m < end;) {
    const PanelBlock block(a, m);
    const int64_t r0 = m % kPanelRows, r1 = smaller(block.rows, r0 + end - m);
    for (int64_t t = 0; t < tiles; t += pass)
      for (int64_t p = p0; p < p1; p++)
        add_tiles_of<V, Plan::wide>(plan.used(a, p), block, r0, r1, t, smaller(t + pass, tiles), steps,
                        panels + (p - p0) * plan.panel_floats, sums + (p - p0) * plan.sums_floats);
    for (int64_t p = p0; p < p1; p++)
      unpack_sums<V>(a, p * plan.panel_tokens, plan.used(a, p), m, m + r1 - r0, sums + (p - p0) * plan.sums_floats);
    m += r1 - r0;
  }
}

template <class V, int Wide, int Group>
int64_t token_panels_workspace(const NmMatmul& a) {
  return PanelPlan<V, Wide, Group>(a).bytes(a);
}

template <class V, int Wide, int Group>
void token_panels(const NmMatmul& a) {
  if (a.tokens <= 0) return;
  const PanelPlan<V, Wide, Group> plan(a);
  const int64_t panels = (a.tokens + plan.panel_tokens - 1) / plan.panel_tokens;
  with_team(a.threads, [&](const Team& team) {
    int64_t k0, k1;
    team.share(panel_steps(a) * kStep, kStep, &k0, &k1);
    for (int64_t p0 = 0; p0 < panels; p0 += plan.group) {
      const int64_t p1 = smaller(p0 + plan.group, panels);
      if (p0 > 0) team.barrier();  // the panels of the last group are still being read
      for (int64_t p = p0; p < p1; p++)
        pack_panel<V>(a, p * plan.panel_tokens, plan.used(a, p), k0, k1,
                      floats_at(a.workspace, (p - p0) * plan.panel_floats * 4));
      team.barrier();
      multiply_group<V>(a, plan, team, p0, p1);
    }
  });
}

}  // namespace
