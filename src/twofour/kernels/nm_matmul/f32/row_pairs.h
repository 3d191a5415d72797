// Design A with shared loads: two output rows at a time, an input that both keep is loaded once for two multiply-adds.
//
// Cores that start two multiply-adds per cycle also load two vectors per cycle at best, and on Intel a 512-bit load
// takes half an arithmetic slot as well, so a product of registers and memory is bound by its loads. Two rows of a 2:4
// weight keep 16 of 64 inputs in common by chance and about 20 after matching (layouts/pairs.cc): a third fewer loads.
#pragma once

#include <cstdint>

#include "kernels/layouts/pair_check.h"
#include "panels.h"

namespace {

using twofour::kPairHead;
using twofour::kPairRecord;
using twofour::kPairRows;
using twofour::kPairTileBytes;

static_assert(kPairRows == kStoreRows);

constexpr int64_t kPairsAhead = 2;  // records fetched ahead into L1: 3 to 10 %, 4 are the same

template <class V, int U>
struct PairSums {
  typename V::reg a[U], b[U];

  static TWOFOUR_INLINE const float* row_of(const char* x, uint8_t input) {
    const char* row = x + (static_cast<uint64_t>(input) << log2_of(panel_stride(U) * V::width * 4));
    asm("" : "+r"(row));  // one base register: an FMA with an indexed operand splits in two on Intel
    return reinterpret_cast<const float*>(row);
  }
  TWOFOUR_INLINE void add_shared(const float* values, const char* x, uint8_t input) {
    const float* row = row_of(x, input);
    const typename V::reg wa = V::broadcast(values), wb = V::broadcast(values + 1);
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) {
      const typename V::reg v = V::load_shared(row + u * V::width);
      a[u] = V::fma(wa, v, a[u]);
      b[u] = V::fma(wb, v, b[u]);
    }
  }
  static TWOFOUR_INLINE void add_single(const float* value, const char* x, uint8_t input, typename V::reg (&sums)[U]) {
    const float* row = row_of(x, input);
    const typename V::reg w = V::broadcast(value);
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) sums[u] = V::fma(w, row + u * V::width, sums[u]);
  }
  // One record, the first `shared` inputs (even) of both rows.
  TWOFOUR_INLINE void add_record(const char* record, int shared, const char* x) {
    const float* values = reinterpret_cast<const float*>(record);
    const auto* input = reinterpret_cast<const uint8_t*>(record + kPanelTile * 4);
    for (int i = shared; i > 0; i -= 2, values += 4, input += 2) {
      add_shared(values, x, input[0]);
      add_shared(values + 2, x, input[1]);
    }
    for (int i = kPanelTile / 2 - shared; i > 0; i -= 2, values += 4, input += 4) {
      add_single(values, x, input[0], a);
      add_single(values + 1, x, input[1], b);
      add_single(values + 2, x, input[2], a);
      add_single(values + 3, x, input[3], b);
    }
  }
};

template <class V, int U>
TWOFOUR_INLINE void finish_pair_row(const typename V::reg (&sums)[U], bool first, float* y) {
  TWOFOUR_UNROLL
  for (int u = 0; u < U; u++) V::store_aligned(y + u * V::width, first ? sums[u] : sums[u] + V::load_aligned(y + u * V::width));
}

struct PairWeights {
  static constexpr int64_t grain = kPairRows;

  template <class V, int U>
  TWOFOUR_NOINLINE static void add(const RowChunk& chunk, int64_t t0, int64_t t1, TransposePipeline<V>* pipeline) {
    constexpr int64_t stride = panel_stride(U) * V::width;
    const Matmul& a = pipeline->a;
    const char* weight = static_cast<const char*>(a.weight);
    for (int64_t t = t0; t < t1; t++)
      for (int64_t d = 0; d < chunk.rows; d += kPairRows) {
        const char* head = weight + ((chunk.row + d) / kPairRows * panel_tiles(a) + t) * kPairTileBytes;
        if (t == t1 - 1 && d > 0 && pipeline->rows > 0) pipeline->enqueue_store(d);
        add_domain<V, U>(head, (least(kPairRows, chunk.rows - d) + 1) / 2,
                         pipeline->panel.panel + t * kPanelTile * stride, t == 0, pipeline->panel.sums + d * stride, pipeline);
      }
  }

  template <class V, int U>
  static TWOFOUR_INLINE void add_domain(const char* packed, int64_t pairs, const float* x, bool first, float* y,
                                        TransposePipeline<V>* pipeline) {
    constexpr int64_t stride = panel_stride(U) * V::width;
    const auto* head = reinterpret_cast<const uint8_t*>(packed);
    const char* record = packed + kPairHead;
    for (int64_t p = 0; p < pairs; p++, head += 4, record += kPairRecord) {
      if (!sound_pair<V>(head, record, pairs)) return report(pipeline->a.damaged);
      float *ya = y + head[0] * stride, *yb = y + head[1] * stride;
      const char* ahead = record + kPairsAhead * kPairRecord;
      for (int64_t line = 0; line < kPairRecord; line += 64) __builtin_prefetch(ahead + line);
      PairSums<V, U> sums;
      TWOFOUR_UNROLL
      for (int u = 0; u < U; u++) sums.a[u] = sums.b[u] = V::zero();
      sums.add_record(record, head[2], reinterpret_cast<const char*>(x));
      finish_pair_row<V, U>(sums.a, first, ya);
      finish_pair_row<V, U>(sums.b, first, yb);
      pipeline->step();
    }
  }
};

}  // namespace
