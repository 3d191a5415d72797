// Design A with shared loads: two output rows at a time, an input that both keep is loaded once for two multiply-adds.
//
// Cores that start two multiply-adds per cycle also load two vectors per cycle at best, and on Intel a 512-bit load
// takes half an arithmetic slot as well, so a product of registers and memory is bound by its loads. Two rows of a 2:4
// weight keep 16 of 64 inputs in common by chance and about 20 after matching (layouts/pairs.cc): a third fewer loads.
#pragma once

#include <cstdint>

#include "kernels/pair_sums.h"
#include "panels.h"

namespace {

static_assert(kPairRows == kStoreRows);

constexpr int64_t kPairsAhead = 2;  // records fetched ahead into L1: 3 to 10 %, 4 are the same

// Inputs of a tile in a panel of U vectors.
template <class V, int U>
struct PanelInputs {
  const char* rows;
  TWOFOUR_INLINE const char* at(uint8_t input) const {
    return rows + (static_cast<uint64_t>(input) << log2_of(panel_stride(U) * V::width * 4));
  }
};

struct PairWeights {
  static constexpr int64_t grain = kPairRows;

  // The last vector of the last panel may hold tokens in a half alone.
  template <class V, int U>
  static void add(const RowChunk& chunk, int64_t t0, int64_t t1, TransposePipeline<V>* pipeline) {
    const int64_t last = pipeline->a.tokens - pipeline->panel.first - (U - 1) * V::width;
    if constexpr (HalfOf<V>::width > 0)
      if (last <= HalfOf<V>::width) return add_tiles<V, U, true>(chunk, t0, t1, pipeline);
    add_tiles<V, U, false>(chunk, t0, t1, pipeline);
  }

  template <class V, int U, bool half>
  TWOFOUR_NOINLINE static void add_tiles(const RowChunk& chunk, int64_t t0, int64_t t1, TransposePipeline<V>* pipeline) {
    constexpr int64_t stride = panel_stride(U) * V::width;
    const Matmul& a = pipeline->a;
    const char* weight = static_cast<const char*>(a.weight);
    for (int64_t t = t0; t < t1; t++) {
      const int padding = padding_of(least(kPanelTile, a.in_features - t * kPanelTile));
      for (int64_t d = 0; d < chunk.rows; d += kPairRows) {
        const char* head = weight + ((chunk.row + d) / kPairRows * panel_tiles(a) + t) * kPairTileBytes;
        if (t == t1 - 1 && d > 0 && pipeline->rows > 0) pipeline->enqueue_store(d);
        add_domain<V, U, half>(head, (least(kPairRows, chunk.rows - d) + 1) / 2, padding,
                               pipeline->panel.panel + t * kPanelTile * stride, t == 0, pipeline->panel.sums + d * stride,
                               pipeline);
      }
    }
  }

  template <class V, int U, bool half>
  static TWOFOUR_INLINE void add_domain(const char* packed, int64_t pairs, int padding, const float* x, bool first, float* y,
                                        TransposePipeline<V>* pipeline) {
    constexpr int64_t stride = panel_stride(U) * V::width;
    const auto* head = reinterpret_cast<const uint8_t*>(packed);
    const char* record = packed + kPairHead;
    const PanelInputs<V, U> inputs{reinterpret_cast<const char*>(x)};
    for (int64_t p = 0; p < pairs; p++, head += 4, record += kPairRecord) {
      if (!sound_pair<V>(head, record, pairs)) return report(pipeline->a.damaged);
      float *ya = y + head[0] * stride, *yb = y + head[1] * stride;
      const char* ahead = record + kPairsAhead * kPairRecord;
      for (int64_t line = 0; line < kPairRecord; line += 64) __builtin_prefetch(ahead + line);
      PairSums<V, U, half, PanelInputs<V, U>> sums;
      sums.clear();
      sums.add_record(record, head[2], padding, inputs);
      sums.a.finish(first, ya);
      sums.b.finish(first, yb);
      pipeline->step();
    }
  }
};

}  // namespace
