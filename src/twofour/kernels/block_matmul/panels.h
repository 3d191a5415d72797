// Many tokens: vectors hold tokens, and each dword of weights is broadcast to the sums of its row. Every block size and
// instruction set fills its vectors so; the tokens are transposed into panels first, and the answers back.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>

#include "blocks.h"
#include "kernels/damaged.h"
#include "native/simd.h"
#include "native/team.h"
#include "shapes.h"
#include "tokens.h"
#include "windows.h"

namespace {

// Rows and vectors of tokens whose sums are in registers.
template <class V, int S>
struct PanelTile {
  static constexpr int most = V::width == 16 ? 8 : 4;
  static constexpr int rows = S < most ? S : most;
  static constexpr int vectors = 2 * most / rows < 4 ? 2 * most / rows : 4;
  static constexpr int tokens = vectors * V::width;
};

template <class D, bool apart>
TWOFOUR_INLINE typename D::V::reg panel_inputs(const float* panel, const uint16_t* index, int64_t step, int64_t stride) {
  using V = typename D::V;
  if constexpr (!apart) return V::load_unaligned(panel + (index[0] + step) * stride);
  typename V::reg x = V::load_unaligned(panel + index[0] * stride);
  TWOFOUR_UNROLL
  for (int e = 1; e < D::per; e++) {
    const float* from = panel + index[e] * stride;
#if defined(TWOFOUR_SET_avx512)
    if constexpr (D::per == 2)
      x = (typename V::reg)_mm512_mask_loadu_epi16((__m512i)x, 0xaaaaaaaa, from);
    else
      x = (typename V::reg)_mm512_mask_loadu_epi8((__m512i)x, 0x1111111111111111u << e, from);
#else
    const typename V::U mask = typename V::U{} + ((D::per == 2 ? 0xffffu : 0xffu) << (32 / D::per * e));
    x = (typename V::reg)(((typename V::U)x & ~mask) | ((typename V::U)V::load_unaligned(from) & mask));
#endif
  }
  return x;
}

// `rows` of a strip of S rows from the one whose weights begin at w, NB vectors of tokens -> sums[row][stride].
template <class D, int S, int rows, int NB, bool apart>
TWOFOUR_NOINLINE void panel_rows(const char* w, const uint16_t* index, int64_t count, int64_t run, const float* panel,
                                 int64_t stride, typename D::Sum* sums, int64_t step) {
  using V = typename D::V;
  typename D::Sum acc[rows][NB] = {};
  const auto add = [&](const uint16_t* at, int64_t k) __attribute__((always_inline)) {
    typename V::reg x[NB];
    TWOFOUR_UNROLL
    for (int b = 0; b < NB; b++) x[b] = panel_inputs<D, apart>(panel + b * V::width, at, k, stride);
    TWOFOUR_UNROLL
    for (int r = 0; r < rows; r++) {
      const typename V::reg one = V::broadcast_shared(reinterpret_cast<const float*>(w) + r);
      TWOFOUR_UNROLL
      for (int b = 0; b < NB; b++) acc[r][b] = D::dot(acc[r][b], x[b], one);
    }
    w += S * 4;
  };
  if (apart || run == 1) {
    constexpr int taken = apart ? D::per : 1;
    for (int64_t i = 0; i < count; i += taken) add(index + i, 0);
  } else {
    for (int64_t i = 0; i < count; i++)
      for (int64_t k = 0; k < run; k++) add(index + i, k);
  }
  TWOFOUR_UNROLL
  for (int r = 0; r < rows; r++) {
    TWOFOUR_UNROLL
    for (int b = 0; b < NB; b++) sums[r * step + b] = acc[r][b];
  }
}

// All strips of a unit for NB vectors of tokens, `tokens` of them from `first` on.
template <class D, int S, bool apart, int NB>
TWOFOUR_NOINLINE void unit_panel(const Matmul& a, const Blocks& b, int64_t unit, const float* panel, int64_t first,
                                 int64_t tokens, const typename D::Token* kept, char* scratch) {
  using V = typename D::V;
  constexpr int rows = PanelTile<V, S>::rows, strips = kBlockUnit / S, parts = kBlockUnit / V::width;
  typename D::Sum sums[kBlockUnit][NB];
  for (int j = 0; j < strips; j++) {
    const int64_t s = unit * strips + j, begin = b.starts[s];
    const uint16_t* index = b.indices + begin;
    if constexpr (apart && D::per == 4) {
      auto* inputs = reinterpret_cast<uint16_t*>(scratch);
      inputs_of(b, s, inputs);
      index = inputs;
    }
    for (int r = 0; r < S; r += rows)
      panel_rows<D, S, rows, NB, apart>(b.weights + (b.shape.steps(begin) * S + r) * 4, index,
                                        b.starts[s + 1] - begin, b.shape.run, panel, NB * V::width, &sums[j * S + r][0],
                                        NB);
  }
  for (int n = 0; n < NB && n * V::width < tokens; n++) {
    typename D::Sum answer[parts * V::width];
    const int64_t here = least(V::width, tokens - n * V::width);
    for (int p = 0; p < parts; p++) {
      typename V::reg square[V::width];
      TWOFOUR_UNROLL
      for (int r = 0; r < V::width; r++) square[r] = (typename V::reg)sums[p * V::width + r][n];
      V::transpose(square);
      TWOFOUR_UNROLL
      for (int t = 0; t < V::width; t++)
        if (t < here) answer[p * here + t] = (typename D::Sum)square[t];
    }
    b.finish<D>(a, answer, kept + n * V::width, first + n * V::width, here, unit);
  }
}

template <class D, int S, bool apart, int NB = PanelTile<typename D::V, S>::vectors>
void unit_panel_of(int64_t vectors, const Matmul& a, const Blocks& b, int64_t unit, const float* panel, int64_t first,
                   int64_t tokens, const typename D::Token* kept, char* scratch) {
  if (vectors == NB) return unit_panel<D, S, apart, NB>(a, b, unit, panel, first, tokens, kept, scratch);
  if constexpr (NB > 1) unit_panel_of<D, S, apart, NB - 1>(vectors, a, b, unit, panel, first, tokens, kept, scratch);
}

// Tokens in panels of PanelTile::tokens, as many per pass over the weights as fit half_second_level().
template <class D>
struct PanelPlan {
  static constexpr int width = D::V::width;
  int64_t tile, panels, per_pass, places, kept_bytes, scratch_bytes;

  PanelPlan(const Matmul& a, const Blocks& b) {
    with_shape<D>(b.shape, [&](auto strip, auto) { tile = PanelTile<typename D::V, strip.value>::tokens; });
    places = round_up(b.shape.places(), width);
    panels = ceil_div(a.tokens, tile);
    per_pass = least(panels, half_second_level() / (places * tile * 4) + 1);
    kept_bytes = round_up(a.tokens * static_cast<int64_t>(sizeof(typename D::Token)), 64);
    scratch_bytes = round_up(rows_bytes<D>(b), 64);
  }
  int64_t panel_floats() const { return places * tile; }
  int64_t bytes(int threads) const {
    return kept_bytes + (threads > 1 ? threads : 1) * scratch_bytes + per_pass * panel_floats() * 4;
  }
  int64_t tokens(const Matmul& a, int64_t panel) const { return least(tile, a.tokens - panel * tile); }
};

template <class D>
int64_t block_panels_workspace(const Matmul& a) {
  if (a.tokens <= 0) return 0;
  return PanelPlan<D>(a, Blocks(a.weight, a.out_features, a.in_features, 4 / D::per)).bytes(a.threads);
}

// The panels of one pass: vector v of panel p is written by one member.
template <class D>
void make_panels(const Matmul& a, const Blocks& b, const PanelPlan<D>& plan, const Team& team, int64_t p0, int64_t p1,
                 char* scratch, float* panels, typename D::Token* kept) {
  constexpr int width = D::V::width;
  for (int64_t p = p0, job = 0; p < p1; p++) {
    const int64_t tokens = plan.tokens(a, p), vectors = ceil_div(tokens, width);
    for (int64_t v = 0; v < vectors; v++, job++) {
      if (job % team.size != team.me) continue;
      const int64_t first = p * plan.tile + v * width;
      panel_vector<D>(a, b, first, least(width, tokens - v * width), scratch, panels + (p - p0) * plan.panel_floats() + v * width,
                      vectors * width, kept + first);
    }
  }
}

template <class D>
void block_panels(const Matmul& a) {
  if (a.tokens <= 0) return;
  constexpr int width = D::V::width;
  const Blocks b(a.weight, a.out_features, a.in_features, 4 / D::per);
  const PanelPlan<D> plan(a, b);
  auto* kept = static_cast<typename D::Token*>(a.workspace);
  char* scratch = static_cast<char*>(a.workspace) + plan.kept_bytes;
  auto* panels = reinterpret_cast<float*>(scratch + (a.threads > 1 ? a.threads : 1) * plan.scratch_bytes);
  with_team(a.threads, [&](const Team& team) {
    int64_t u0, u1;
    team.share(b.shape.units, 1, &u0, &u1);
    char* own = scratch + team.me * plan.scratch_bytes;
    const bool sound = b.sound(u0, u1);
    if (!sound) report(a.damaged);
    for (int64_t p0 = 0; p0 < plan.panels; p0 += plan.per_pass) {
      const int64_t p1 = least(p0 + plan.per_pass, plan.panels);
      if (p0 > 0) team.barrier();  // the last panels are still being read
      make_panels<D>(a, b, plan, team, p0, p1, own, panels, kept);
      team.barrier();
      if (!sound) continue;
      with_shape<D>(b.shape, [&](auto strip, auto run) {
        for (int64_t u = u0; u < u1; u++)
          for (int64_t p = p0; p < p1; p++) {
            const int64_t tokens = plan.tokens(a, p), first = p * plan.tile;
            unit_panel_of<D, strip.value, run.value == 0 && (D::per > 1)>(ceil_div(tokens, width), a, b, u,
                                                                         panels + (p - p0) * plan.panel_floats(), first,
                                                                         tokens, kept + first, own);
          }
      });
    }
  });
}

}  // namespace
