// What both token-vectorised kernels share: x transposed into panels, sums transposed into y, and the loops around.
//
// A panel is P[k][tokens] for up to 8 vectors of tokens; sums are S[row][tokens] with the same stride. A Weights type
// says how packed rows are cut and multiplies some of them with one panel (token_panels.h, row_pairs.h). The sums of
// one pass are formed on their own and then added: no chain of additions is longer than a pass over 64 to 512 inputs.
// Included once per instruction-set file, with V the vector type of that file; everything has internal linkage.
#pragma once

#include <cstdint>

#include "f32_layout.h"
#include "kernels/epilogue_math.h"
#include "kernels/nm_matmul/nm_matmul.h"
#include "native/compiler.h"
#include "native/team.h"

namespace {

using twofour::kPanelRows;
using twofour::kPanelTile;
using twofour::NmMatmul;

constexpr int64_t kPanelL1Bytes = 32768;  // panel bytes one pass over the rows keeps in L1 (32 to 48 KB)

TWOFOUR_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
TWOFOUR_INLINE float* floats_at(void* base, int64_t bytes) {
  return reinterpret_cast<float*>(static_cast<char*>(base) + bytes);
}
TWOFOUR_INLINE int64_t panel_tiles(const NmMatmul& a) { return (a.in_features + kPanelTile - 1) / kPanelTile; }

// Vectors between two panel rows for a panel that uses `used` of them: the next power of two, so that an input becomes
// an address by shifting.
constexpr int panel_stride(int used) { return used <= 1 ? 1 : used <= 2 ? 2 : used <= 4 ? 4 : 8; }
constexpr int log2_of(int64_t n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

// One W x W corner of x, transposed to panel rows; `tokens` and `inputs` of it exist, the rest becomes zero.
template <class V, bool whole>
TWOFOUR_INLINE void pack_square(const float* x, int64_t x_stride, int64_t tokens, int64_t inputs, float* panel,
                                int64_t stride) {
  typename V::reg t[V::width];
  TWOFOUR_UNROLL
  for (int i = 0; i < V::width; i++) {
    if (whole) t[i] = V::load_unaligned(x + i * x_stride);
    else t[i] = i < tokens && inputs > 0 ? V::load_partial(x + i * x_stride, smaller(inputs, V::width)) : V::zero();
  }
  V::transpose(t);
  TWOFOUR_UNROLL
  for (int i = 0; i < V::width; i++) V::store(panel + i * stride, t[i]);
}

// x[first token.., k0..k1) -> panel[k][tokens]; tokens and inputs past the end become zero.
template <class V>
TWOFOUR_NOINLINE void pack_panel(const NmMatmul& a, int64_t first, int used, int64_t k0, int64_t k1, float* panel) {
  const int64_t stride = panel_stride(used) * V::width;
  for (int u = 0; u < used; u++) {
    const int64_t token = first + u * V::width, tokens = a.tokens - token;
    for (int64_t k = k0; k < k1; k += V::width) {
      const float* from = x_of(a) + token * a.x_stride + k;
      float* to = panel + k * stride + u * V::width;
      const int64_t inputs = a.in_features - k;
      if (tokens >= V::width && inputs >= V::width) pack_square<V, true>(from, a.x_stride, tokens, inputs, to, stride);
      else pack_square<V, false>(from, a.x_stride, tokens, inputs, to, stride);
    }
  }
}

// One W x W corner of the sums, transposed to rows of y; `tokens` and `rows` of it exist.
template <class V, bool whole>
TWOFOUR_INLINE void unpack_square(const float* sums, int64_t stride, typename V::reg bias, int64_t tokens, int64_t rows,
                                  float* y, int64_t y_stride) {
  typename V::reg t[V::width];
  TWOFOUR_UNROLL
  for (int i = 0; i < V::width; i++) t[i] = whole || i < rows ? V::load(sums + i * stride) : V::zero();
  V::transpose(t);
  TWOFOUR_UNROLL
  for (int i = 0; i < V::width; i++) {
    if (whole) V::store_unaligned(y + i * y_stride, V::add(t[i], bias));
    else if (i < tokens) V::store_partial(y + i * y_stride, V::add(t[i], bias), smaller(rows, V::width));
  }
}

// sums[row][tokens] of rows [m0, m1) -> y[token][row] with bias and epilogue.
template <class V>
TWOFOUR_NOINLINE void unpack_sums(const NmMatmul& a, int64_t first, int used, int64_t m0, int64_t m1,
                                  const float* sums) {
  const int64_t stride = panel_stride(used) * V::width;
  for (int u = 0; u < used; u++) {
    const int64_t token = first + u * V::width, tokens = a.tokens - token;
    for (int64_t m = m0; m < m1; m += V::width) {
      const int64_t rows = m1 - m;
      const float* from = sums + (m - m0) * stride + u * V::width;
      float* to = y_of(a) + token * a.y_stride + m;
      const auto bias = a.bias == nullptr ? V::zero() : V::load_partial(a.bias + m, smaller(rows, V::width));
      if (tokens >= V::width && rows >= V::width)
        unpack_square<V, true>(from, stride, bias, tokens, rows, to, a.y_stride);
      else unpack_square<V, false>(from, stride, bias, tokens, rows, to, a.y_stride);
    }
    if (!a.epilogue.plain())
      finish_rows<V>(a.epilogue, y_of(a), a.y_stride, token, smaller(tokens, V::width), m0, m1 - m0);
  }
}

// Rows [row, row + rows) of the weights: a chunk that lies inside kPanelRows aligned rows.
struct RowChunk {
  int64_t row, rows;
};

// How a call is cut: panels of up to `Wide` vectors of tokens, evenly filled, `Group` panels per pass over the weights.
template <class V, int Wide, int Group>
struct PanelPlan {
  static constexpr int wide = Wide;
  int64_t vectors, panel_tokens, group, panel_floats, sums_floats;
  static constexpr int64_t round16(int64_t n) { return (n + 15) / 16 * 16; }
  static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

  explicit PanelPlan(const NmMatmul& a) {
    const int64_t all = a.tokens > 0 ? ceil_div(a.tokens, V::width) : 1;
    int64_t panels = ceil_div(all, Wide);
    // As many panels as threads, if they stay at least half as wide: no thread then waits for another.
    const int64_t even = ceil_div(panels, threads(a)) * threads(a);
    if (Group == 1 && all >= even * Wide / 2) panels = even;
    vectors = ceil_div(all, panels);
    panel_tokens = vectors * V::width;
    group = smaller(Group, ceil_div(all, vectors));
    const int64_t stride = panel_stride(static_cast<int>(vectors)) * V::width;
    panel_floats = round16(panel_tiles(a) * kPanelTile * stride);
    sums_floats = round16(smaller(kPanelRows, a.out_features + 1) * stride);  // pairs may add a row of zeros
  }
  int used(const NmMatmul& a, int64_t panel) const {
    const int64_t left = ceil_div(a.tokens - panel * panel_tokens, V::width);
    return static_cast<int>(smaller(left, vectors));
  }
  // Panels of one group, or one panel per thread; then every thread's sums.
  int64_t panel_bytes(const NmMatmul& a) const { return (Group == 1 ? threads(a) : group) * panel_floats * 4; }
  int64_t bytes(const NmMatmul& a) const { return panel_bytes(a) + threads(a) * group * sums_floats * 4; }
  static int64_t threads(const NmMatmul& a) { return a.threads > 1 ? a.threads : 1; }
};

// One chunk through tiles [t0, t1) of a panel that uses `used` <= U vectors.
template <class V, class Weights, int U>
void add_chunk(int used, const NmMatmul& a, const RowChunk& chunk, int64_t t0, int64_t t1, const float* panel,
               float* sums) {
  if (used == U) return Weights::template add<V, U>(a, chunk, t0, t1, panel, sums);
  if constexpr (U > 1) add_chunk<V, Weights, U - 1>(used, a, chunk, t0, t1, panel, sums);
}

// Panels [p0, p1), packed: this member's rows of the whole output, chunk by chunk, in L1-sized passes.
template <class V, class Weights, class Plan>
void multiply_group(const NmMatmul& a, const Plan& plan, const Team& team, int64_t p0, int64_t p1, const float* panels,
                    float* sums) {
  const int64_t tiles = panel_tiles(a), row_bytes = panel_stride(plan.used(a, p0)) * V::width * 4;
  const int64_t fit = kPanelL1Bytes / (kPanelTile * row_bytes), pass = fit > 0 ? fit : 1;
  int64_t begin, end;
  team.share(a.out_features, Weights::grain, &begin, &end);
  for (int64_t m = begin; m < end;) {
    const RowChunk chunk{m, smaller(kPanelRows - m % kPanelRows, end - m)};
    for (int64_t t = 0; t < tiles; t += pass)
      for (int64_t p = p0; p < p1; p++)
        add_chunk<V, Weights, Plan::wide>(plan.used(a, p), a, chunk, t, smaller(t + pass, tiles),
                                          panels + (p - p0) * plan.panel_floats, sums + (p - p0) * plan.sums_floats);
    for (int64_t p = p0; p < p1; p++)
      unpack_sums<V>(a, p * plan.panel_tokens, plan.used(a, p), m, m + chunk.rows, sums + (p - p0) * plan.sums_floats);
    m += chunk.rows;
  }
}

template <class V, int Wide, int Group>
int64_t panel_product_workspace(const NmMatmul& a) {
  return PanelPlan<V, Wide, Group>(a).bytes(a);
}

// The members share the rows of each group of panels; where the panels of a one-panel group divide evenly, each member
// takes whole panels instead and nobody waits: a barrier costs a time slice when another process wants the core.
template <class V, class Weights, int Wide, int Group>
void panel_product(const NmMatmul& a) {
  if (a.tokens <= 0) return;
  const PanelPlan<V, Wide, Group> plan(a);
  const int64_t panels = (a.tokens + plan.panel_tokens - 1) / plan.panel_tokens;
  with_team(a.threads, [&](const Team& team) {
    const bool apart = Group == 1 && panels % team.size == 0;
    const Team together = apart ? Team{0, 1} : team;
    float* packed = floats_at(a.workspace, apart ? team.me * plan.panel_floats * 4 : 0);
    float* sums = floats_at(a.workspace, plan.panel_bytes(a) + team.me * plan.group * plan.sums_floats * 4);
    const int64_t first = apart ? team.me : 0, step = apart ? team.size : plan.group;
    int64_t k0, k1;
    together.share(panel_tiles(a) * kPanelTile, 16, &k0, &k1);
    for (int64_t p0 = first; p0 < panels; p0 += step) {
      const int64_t p1 = smaller(p0 + plan.group, panels);
      if (p0 > first) together.barrier();  // the panels of the last group are still being read
      for (int64_t p = p0; p < p1; p++)
        pack_panel<V>(a, p * plan.panel_tokens, plan.used(a, p), k0, k1, packed + (p - p0) * plan.panel_floats);
      together.barrier();
      multiply_group<V, Weights>(a, plan, together, p0, p1, packed, sums);
    }
  });
}

}  // namespace
