// What both token-vectorised kernels share: the loops around them, in threads.
//
// A panel is P[k][tokens] for up to 8 vectors of tokens; sums are S[row][tokens] with the same stride. A Weights type
// says how packed rows are cut and multiplies some of them with one panel (token_panels.h, row_pairs.h). The sums of
// one pass are formed on their own and then added: no chain of additions is longer than a pass over 64 to 512 inputs.
// Included once per instruction-set file, with V the vector type of that file; everything has internal linkage.
#pragma once

#include <cstdint>

#include "native/team.h"
#include "native/integers.h"
#include "transpose_pipeline.h"

namespace {

using twofour::kPanelRows;
using twofour::kPanelTile;
using twofour::Matmul;

constexpr int64_t kPanelL1Bytes = 32768;   // panel bytes one pass over the rows keeps in an L1 of 48 KB
constexpr int64_t kNarrowL1Bytes = 16384;  // and of 32 KB, where the weights and sums that pass need the rest

// Rows [row, row + rows) of the weights: a chunk that lies inside kPanelRows aligned rows.
struct RowChunk {
  int64_t row, rows;
};

// How a call is cut: panels of up to `Wide` vectors of tokens, all of one size or one less, `Group` panels per pass over the
// weights, `PassBytes` of a panel per pass over the rows.
template <class V, int Wide, int Group, int64_t PassBytes>
struct PanelPlan {
  static constexpr int wide = Wide;
  static constexpr int64_t pass_bytes = PassBytes;
  int64_t vectors, panels, group, panel_floats, sums_floats;

  explicit PanelPlan(const Matmul& a) {
    vectors = a.tokens > 0 ? ceil_div(a.tokens, V::width) : 1;
    panels = ceil_div(vectors, Wide);
    // As many panels as threads, if they stay at least half as wide: no thread then waits for another.
    const int64_t even = ceil_div(panels, threads(a)) * threads(a);
    if (Group == 1 && vectors >= even * Wide / 2) panels = even;
    group = least(Group, panels);
    const int64_t stride = panel_stride(used(0)) * V::width;
    panel_floats = round_up(panel_tiles(a) * kPanelTile * stride, 16);
    sums_floats = round_up(least(kPanelRows, a.out_features + 1) * stride, 16);  // pairs may add a row of zeros
  }
  // The first vector of a panel: the wider ones come first.
  int64_t begin(int64_t panel) const { return ceil_div(vectors * panel, panels); }
  int used(int64_t panel) const { return static_cast<int>(begin(panel + 1) - begin(panel)); }
  Panel panel(int64_t index, float* panel, float* sums) const {
    return {begin(index) * V::width, used(index), panel, sums};
  }
  // Panels of one group, or one panel per thread; then every thread's sums.
  int64_t panel_bytes(const Matmul& a) const { return (Group == 1 ? threads(a) : group) * panel_floats * 4; }
  int64_t bytes(const Matmul& a) const { return panel_bytes(a) + threads(a) * group * sums_floats * 4; }
  static int64_t threads(const Matmul& a) { return a.threads > 1 ? a.threads : 1; }
};

// One chunk through tiles [t0, t1) of a panel that uses `used` <= U vectors.
template <class V, class Weights, int U>
void multiply_chunk(const RowChunk& chunk, int64_t t0, int64_t t1, TransposePipeline<V>* pipeline) {
  if (pipeline->panel.used == U) return Weights::template add<V, U>(chunk, t0, t1, pipeline);
  if constexpr (U > 1) multiply_chunk<V, Weights, U - 1>(chunk, t0, t1, pipeline);
}

// Tiles that one pass over the rows keeps in L1.
template <class V, class Plan>
int64_t tiles_per_pass(const Plan& plan, int64_t panel) {
  const int64_t fit = Plan::pass_bytes / (kPanelTile * panel_stride(plan.used(panel)) * V::width * 4);
  return fit > 0 ? fit : 1;
}

// Panels [p0, p1): this member's rows of the whole output, chunk by chunk, in L1-sized passes. `ahead`: each pass over
// the first chunk packs what the next one reads.
template <class V, class Weights, class Plan>
void multiply_group(const Matmul& a, const Plan& plan, const Team& team, int64_t p0, int64_t p1, bool ahead,
                    float* panels, float* sums) {
  const int64_t tiles = panel_tiles(a), pass = tiles_per_pass<V>(plan, p0);
  int64_t begin, end;
  team.share(a.out_features, Weights::grain, &begin, &end);
  for (int64_t m = begin; m < end;) {
    const RowChunk chunk{m, least(kPanelRows - m % kPanelRows, end - m)};
    for (int64_t t = 0; t < tiles; t += pass) {
      const int64_t stop = least(t + pass, tiles);
      for (int64_t p = p0; p < p1; p++) {
        TransposePipeline<V> pipeline{a, plan.panel(p, panels + (p - p0) * plan.panel_floats, sums + (p - p0) * plan.sums_floats)};
        if (ahead && m == begin) pipeline.enqueue_pack(stop * kPanelTile, least(stop + pass, tiles) * kPanelTile);
        if (stop == tiles) pipeline.row = m, pipeline.rows = chunk.rows;
        multiply_chunk<V, Weights, Plan::wide>(chunk, t, stop, &pipeline);
        if (stop == tiles) pipeline.enqueue_store(chunk.rows);
        pipeline.finish();
      }
    }
    m += chunk.rows;
  }
}

template <class V, int Wide, int Group, int64_t PassBytes = kPanelL1Bytes>
int64_t panel_product_workspace(const Matmul& a) {
  return PanelPlan<V, Wide, Group, PassBytes>(a).bytes(a);
}

// The members share the rows of each group of panels; where the panels of a one-panel group divide evenly, each member
// takes whole panels instead and nobody waits: a barrier costs a time slice when another process wants the core.
template <class V, class Weights, int Wide, int Group, int64_t PassBytes = kPanelL1Bytes>
void panel_product(const Matmul& a) {
  if (a.tokens <= 0) return;
  const PanelPlan<V, Wide, Group, PassBytes> plan(a);
  with_team(a.threads, [&](const Team& team) {
    const bool apart = Group == 1 && plan.panels % team.size == 0;
    const Team together = apart ? Team{0, 1} : team;
    float* packed = floats_at(a.workspace, apart ? team.me * plan.panel_floats * 4 : 0);
    float* sums = floats_at(a.workspace, plan.panel_bytes(a) + team.me * plan.group * plan.sums_floats * 4);
    const int64_t first = apart ? team.me : 0, step = apart ? team.size : plan.group;
    const bool ahead = together.size == 1 && Group == 1;
    for (int64_t p0 = first; p0 < plan.panels; p0 += step) {
      const int64_t p1 = least(p0 + plan.group, plan.panels);
      if (p0 > first) together.barrier();  // the panels of the last group are still being read
      const int64_t tiles = ahead ? least(tiles_per_pass<V>(plan, p0), panel_tiles(a)) : panel_tiles(a);
      for (int64_t p = p0; p < p1; p++) {
        TransposePipeline<V> pipeline{a, plan.panel(p, packed + (p - p0) * plan.panel_floats, nullptr)};
        int64_t k0, k1;
        together.share(tiles * kPanelTile, V::width, &k0, &k1);
        pipeline.enqueue_pack(k0, k1);
        pipeline.finish();
      }
      together.barrier();
      multiply_group<V, Weights>(a, plan, together, p0, p1, ahead, packed, sums);
    }
  });
}

}  // namespace
