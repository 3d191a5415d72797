// Design A, token-vectorised: vectors hold tokens, and the metadata of a kept pair is an address.
//
// x is transposed into panels whose rows are vectors of tokens; sums are S[row][tokens] with the same stride. A panel P
// says what its rows are: inputs as floats here; pairs have their own loops (pair_panels.h). The sums of one pass over
// the inputs are formed on their own and then added: no chain of additions is long.
// Included once per instruction-set file; everything has internal linkage.
#pragma once

#include <cstring>

#include "inputs.h"
#include "kernels/layouts/panels.h"

namespace {

using twofour::kPanelRows;
using twofour::kPanelTile;

constexpr int64_t kPanelL1Bytes = 32768;           // panel bytes one pass over the rows keeps in L1 (32 to 48 KB)
constexpr int64_t kTileGroups = kPanelTile / 4;  // groups of inputs in a tile

TWOFOUR_INLINE int64_t panel_tiles(const Matmul& a) { return ceil_div(a.in_features, kPanelTile); }

// Vectors between two panel rows for a panel that uses `used` of them: the next power of two, so that metadata becomes
// an address by shifting.
constexpr int panel_stride(int used) { return used <= 1 ? 1 : used <= 2 ? 2 : used <= 4 ? 4 : 8; }
constexpr int log2_of(int64_t n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

TWOFOUR_INLINE uint64_t shifted(uint64_t bits, int left) { return left >= 0 ? bits << left : bits >> -left; }

// Rows whose sums fill the registers meant for them.
template <class P>
constexpr int rows_at_once(int stride) {
  return P::V::sums / stride < P::most_rows ? P::V::sums / stride : P::most_rows;
}

// Panels of inputs as floats: P[k][tokens]. A kept pair is two weights and two rows.
template <class Vector>
struct FloatPanel {
  using V = Vector;
  static constexpr int64_t group_rows = 4, inputs_at_once = V::width;
  static constexpr int most_rows = 4;

  // Inputs [k, k + width) of `tokens` tokens, transposed to panel rows; `tokens` and `inputs` of them exist.
  template <Type type, bool whole>
  static TWOFOUR_INLINE void pack(const char* x, int64_t x_bytes, int64_t tokens, int64_t inputs, float* panel,
                                  int64_t stride) {
    typename V::reg t[V::width];
    TWOFOUR_UNROLL
    for (int i = 0; i < V::width; i++) {
      if (whole) t[i] = load_rounded<V>(x + i * x_bytes, type, V::width);
      else t[i] = i < tokens && inputs > 0 ? load_rounded<V>(x + i * x_bytes, type, inputs) : V::zero();
    }
    V::transpose(t);
    TWOFOUR_UNROLL
    for (int i = 0; i < V::width; i++) V::store_aligned(panel + i * stride, t[i]);
  }

  // Four groups (16 inputs) of R rows against U vectors of tokens.
  template <int U, int R>
  static TWOFOUR_INLINE void add_four(const char* values, int64_t row_bytes, const char* x, const uint64_t (&meta)[R],
                                      typename V::reg (&acc)[R][U]) {
    constexpr int64_t stride = panel_stride(U) * V::width * 4;
    constexpr int shift = log2_of(stride);
    constexpr uint64_t two_bits = uint64_t{3} << shift;
    TWOFOUR_UNROLL
    for (int g = 0; g < 4; g++) {
      TWOFOUR_UNROLL
      for (int r = 0; r < R; r++) {
        const uint64_t first = shifted(meta[r], shift - 4 * g) & two_bits;
        const uint64_t second = shifted(meta[r], shift - 4 * g - 2) & two_bits;
        typename V::reg w[2];
        V::broadcast_pair(values + r * row_bytes + g * 4, w);
        const char* row[2] = {x + first + g * 4 * stride, x + second + g * 4 * stride};
        TWOFOUR_UNROLL
        for (int i = 0; i < 2; i++) {
          asm("" : "+r"(row[i]));  // one base register: an FMA with an indexed operand splits in two on Intel
          TWOFOUR_UNROLL
          for (int u = 0; u < U; u++)
            acc[r][u] = V::fma(w[i], reinterpret_cast<const float*>(row[i]) + u * V::width, acc[r][u]);
        }
      }
    }
  }
};

// x[first token.., k0..k1) -> panel rows; tokens and inputs past the end become zero.
template <class P, Type type>
TWOFOUR_NOINLINE void pack_panel_of(const Matmul& a, int64_t first, int used, int64_t k0, int64_t k1, float* panel) {
  using V = typename P::V;
  const int64_t stride = panel_stride(used) * V::width, columns_step = a.x_stride * (type == Type::f32 ? 4 : 2);
  for (int u = 0; u < used; u++) {
    const int64_t token = first + u * V::width, tokens = a.tokens - token;
    for (int64_t k = k0; k < k1; k += P::inputs_at_once) {
      float* to = panel + k / 4 * P::group_rows * stride + u * V::width;
      const int64_t inputs = a.in_features - k;
      const auto [x, x_bytes] = a.columns ? InputsAt{element(a.x, type, k * a.x_stride + token), columns_step}
                                          : inputs_at(a, type, token, k);
      if (a.columns)
        for (int i = 0; i < P::inputs_at_once; i++)
          V::store_aligned(to + i * stride, i < inputs ? load_rounded<V>(x + i * x_bytes, type, tokens) : V::zero());
      else if (tokens >= V::width && inputs >= P::inputs_at_once)
        P::template pack<type, true>(x, x_bytes, tokens, inputs, to, stride);
      else P::template pack<type, false>(x, x_bytes, tokens, inputs, to, stride);
    }
  }
}
template <class P>
void pack_panel(const Matmul& a, int64_t first, int used, int64_t k0, int64_t k1, float* panel) {
  if (a.x_type == Type::f32) pack_panel_of<P, Type::f32>(a, first, used, k0, k1, panel);
  else pack_panel_of<P, Type::bf16>(a, first, used, k0, k1, panel);
}

// sums[row][tokens] of rows [m0, m1) -> y[token][row] with bias and epilogue.
template <class V, Activation kind, Type type>
TWOFOUR_NOINLINE void unpack_as(const Matmul& a, int64_t first, int used, int64_t m0, int64_t m1, const float* sums) {
  const int64_t stride = panel_stride(used) * V::width;
  const Combine combine = a.epilogue.combine;
  for (int u = 0; u < used; u++)
    for (int64_t m = m0; m < m1; m += V::width) {
      const int64_t token = first + u * V::width, rows = least(m1 - m, V::width);
      const float* from = sums + (m - m0) * stride + u * V::width;
      const typename V::reg bias = bias_of<V>(a, m, rows);
      typename V::reg t[V::width];
      TWOFOUR_UNROLL
      for (int i = 0; i < V::width; i++) t[i] = i < rows ? V::load_aligned(from + i * stride) : V::zero();
      V::transpose(t);
      for (int i = 0; i < V::width && token + i < a.tokens; i++) {
        typename V::reg y = activated<kind, V, type == Type::bf16 ? Rounding::bfloat16 : Rounding::float32>(t[i] + bias);
        if (combine != Combine::none) {
          const char* other = element(a.epilogue.other, type, (token + i) * a.epilogue.other_stride + m);
          y = apply_combine<V>(y, load_numbers<V>(other, type, rows), combine);
        }
        store_numbers<V>(const_cast<char*>(element(a.y, type, (token + i) * a.y_stride + m)), type, y, rows);
      }
    }
}
// sums[row][tokens] of rows [m0, m1) -> y that stands as (outputs, tokens).
template <class V>
TWOFOUR_NOINLINE void store_rows(const Matmul& a, int64_t first, int used, int64_t m0, int64_t m1,
                                 const float* sums) {
  const int64_t stride = panel_stride(used) * V::width;
  for (int64_t m = m0; m < m1; m++)
    for (int u = 0; u < used; u++) {
      const int64_t token = first + u * V::width;
      char* y = const_cast<char*>(element(a.y, a.y_type, m * a.y_stride + token));
      store_numbers<V>(y, a.y_type, V::load_aligned(sums + (m - m0) * stride + u * V::width), a.tokens - token);
    }
}
template <class V>
void unpack_sums(const Matmul& a, int64_t first, int used, int64_t m0, int64_t m1, const float* sums) {
  if (a.columns) return store_rows<V>(a, first, used, m0, m1, sums);
  with_activation(a.epilogue.activation, [&](auto constant) {
    constexpr Activation kind = decltype(constant)::value;
    if (a.y_type == Type::bf16) unpack_as<V, kind, Type::bf16>(a, first, used, m0, m1, sums);
    else unpack_as<V, kind, Type::f32>(a, first, used, m0, m1, sums);
  });
}

// Rows [row, row + rows) of the weights, inside one block; and that block in the packed bytes.
struct RowChunk : PanelBlock<2, const char> {
  int64_t row, rows;

  RowChunk(const Matmul& a, int64_t at, int64_t end)
      : PanelBlock(static_cast<const char*>(a.weight), at, a.out_features, a.in_features), row(at),
        rows(least(first + kPanelRows, end) - at) {}
};

// Tiles [t0, t1) of R rows, the first being the r0-th of its block. Their sums are formed apart and then added to y.
template <class P, int U, int R>
TWOFOUR_INLINE void add_rows(const Matmul& a, const RowChunk& chunk, int64_t r0, int64_t t0, int64_t t1,
                             const float* panel, float* y) {
  using V = typename P::V;
  constexpr int64_t stride = panel_stride(U) * V::width * 4;
  typename V::reg acc[R][U];
  TWOFOUR_UNROLL
  for (int r = 0; r < R; r++) {
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) acc[r][u] = V::zero();
  }
  const char* x = reinterpret_cast<const char*>(panel) + t0 * kTileGroups * P::group_rows * stride;
  const int64_t quads = ceil_div(a.in_features, 16);
  for (int64_t t = t0; t < t1; t++) {
    const char* tile = chunk.tiles + t * chunk.tile_bytes;
    uint64_t meta[R];
    std::memcpy(meta, tile + r0 * 8, sizeof meta);
    const char* values = tile + chunk.meta_bytes + r0 * kPanelTile;
    for (int64_t q = least(kTileGroups / 4, quads - t * (kTileGroups / 4)); q > 0; q--) {
      P::template add_four<U, R>(values, kPanelTile, x, meta, acc);
      for (int r = 0; r < R; r++) meta[r] >>= 16;
      values += 16;
      x += 4 * P::group_rows * stride;
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

// One chunk through tiles [t0, t1) of a panel that uses `used` <= U vectors.
template <class P, int U>
TWOFOUR_NOINLINE void add_chunk(int used, const Matmul& a, const RowChunk& chunk, int64_t t0, int64_t t1,
                                const float* panel, float* y) {
  if constexpr (U > 1)
    if (used < U) return add_chunk<P, U - 1>(used, a, chunk, t0, t1, panel, y);
  constexpr int64_t stride = panel_stride(U) * P::V::width;
  constexpr int R = rows_at_once<P>(panel_stride(U));
  int64_t row = chunk.row % kPanelRows;
  const int64_t end = row + chunk.rows;
  for (; row + R <= end; row += R, y += R * stride) add_rows<P, U, R>(a, chunk, row, t0, t1, panel, y);
  for (; row < end; row++, y += stride) add_rows<P, U, 1>(a, chunk, row, t0, t1, panel, y);
}

// How a call is cut: panels of up to `Wide` vectors of tokens, evenly filled, `Group` panels per pass over the weights.
template <class P, int Wide, int Group>
struct PanelPlan {
  using V = typename P::V;
  int64_t vectors, panel_tokens, panels, group, panel_floats, sums_floats, threads;

  explicit PanelPlan(const Matmul& a) {
    const int64_t all = a.tokens > 0 ? ceil_div(a.tokens, V::width) : 1;
    vectors = ceil_div(all, ceil_div(all, Wide));
    panel_tokens = vectors * V::width;
    panels = ceil_div(all, vectors);
    group = least(Group, panels);
    const int64_t stride = panel_stride(static_cast<int>(vectors)) * V::width;
    panel_floats = ceil_div(panel_tiles(a) * kTileGroups * P::group_rows * stride, 16) * 16;
    sums_floats = ceil_div(least(kPanelRows, a.out_features) * stride, 16) * 16;
    threads = a.threads > 1 ? a.threads : 1;
  }
  int used(const Matmul& a, int64_t panel) const {
    return static_cast<int>(least(ceil_div(a.tokens - panel * panel_tokens, V::width), vectors));
  }
  int64_t bytes() const { return group * (panel_floats + threads * sums_floats) * 4; }
};

// Panels [p0, p1), packed: rows [begin, end) of the output, chunk by chunk, in L1-sized passes.
template <class P, int Wide, class Plan>
void multiply_group(const Matmul& a, const Plan& plan, int64_t begin, int64_t end, int64_t p0, int64_t p1,
                    const float* panels, float* sums) {
  using V = typename P::V;
  const int64_t tiles = panel_tiles(a), row_bytes = panel_stride(plan.used(a, p0)) * V::width * 4;
  const int64_t fit = kPanelL1Bytes / (kTileGroups * P::group_rows * row_bytes), pass = fit > 0 ? fit : 1;
  for (int64_t m = begin; m < end;) {
    const RowChunk chunk(a, m, end);
    for (int64_t t = 0; t < tiles; t += pass)
      for (int64_t p = p0; p < p1; p++)
        add_chunk<P, Wide>(plan.used(a, p), a, chunk, t, least(t + pass, tiles),
                           panels + (p - p0) * plan.panel_floats, sums + (p - p0) * plan.sums_floats);
    for (int64_t p = p0; p < p1; p++)
      unpack_sums<V>(a, p * plan.panel_tokens, plan.used(a, p), m, m + chunk.rows, sums + (p - p0) * plan.sums_floats);
    m += chunk.rows;
  }
}

template <class P, int Wide, int Group>
int64_t panel_product_workspace(const Matmul& a) {
  return PanelPlan<P, Wide, Group>(a).bytes();
}

// The members share the packing of every group of panels, then the rows of the output.
template <class P, int Wide, int Group>
void panel_product(const Matmul& a) {
  if (a.tokens <= 0) return;
  const PanelPlan<P, Wide, Group> plan(a);
  float* packed = static_cast<float*>(a.workspace);
  with_team(a.threads, [&](const Team& team) {
    float* sums = packed + plan.group * (plan.panel_floats + team.me * plan.sums_floats);
    int64_t k0, k1, begin, end;
    team.share(panel_tiles(a) * kPanelTile, kPanelTile, &k0, &k1);
    team.share(a.out_features, 16, &begin, &end);
    for (int64_t p0 = 0; p0 < plan.panels; p0 += plan.group) {
      const int64_t p1 = least(p0 + plan.group, plan.panels);
      if (p0 > 0) team.barrier();  // the panels of the last group are still being read
      for (int64_t p = p0; p < p1; p++)
        pack_panel<P>(a, p * plan.panel_tokens, plan.used(a, p), k0, k1, packed + (p - p0) * plan.panel_floats);
      team.barrier();
      multiply_group<P, Wide>(a, plan, begin, end, p0, p1, packed, sums);
    }
  });
}

}  // namespace
