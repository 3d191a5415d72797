// The inner loops: one tile of 64 inputs of two output channels at a time, with a panel of up to 8 vectors of pixels.
//
// Weights are in the layout "pairs" (nm_matmul/README.md): an input that both channels keep is loaded once for two
// multiply-adds.
#pragma once

#include <cstdint>

#include "kernels/layouts/pairs.h"
#include "kernels/layouts/pair_check.h"
#include "native/compiler.h"

namespace {

using twofour::kPairHead;
using twofour::kPairRecord;
using twofour::kPairRows;
using twofour::kPairTileBytes;
using twofour::kPanelTile;

constexpr int64_t kRecordsNear = 2, kRecordsFar = 48;  // records fetched ahead into L1 and L2 (README.md)

// Where the inputs of a tile stand: 64 channels at equal distances, or anywhere (a tile that holds several taps).
struct EvenInputs {
  const char* base;
  int64_t distance;
  TWOFOUR_INLINE const char* at(uint8_t input) const { return base + input * distance; }
};
struct AnyInputs {
  const char* base;
  const int64_t* offsets;
  TWOFOUR_INLINE const char* at(uint8_t input) const { return base + offsets[input]; }
};

template <class V, int U, class Inputs>
struct ConvSums {
  typename V::reg a[U], b[U];

  static TWOFOUR_INLINE const float* row_of(const Inputs& x, uint8_t input) {
    const char* row = x.at(input);
    asm("" : "+r"(row));  // one base register: an FMA with an indexed operand splits in two on Intel
    return reinterpret_cast<const float*>(row);
  }
  TWOFOUR_INLINE void add_shared(const float* values, const Inputs& x, uint8_t input) {
    const float* row = row_of(x, input);
    const typename V::reg wa = V::broadcast(values), wb = V::broadcast(values + 1);
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) {
      const typename V::reg v = V::load_shared(row + u * V::width);
      a[u] = V::fma(wa, v, a[u]);
      b[u] = V::fma(wb, v, b[u]);
    }
  }
  static TWOFOUR_INLINE void add_single(const float* value, const Inputs& x, uint8_t input,
                                        typename V::reg (&sums)[U]) {
    const float* row = row_of(x, input);
    const typename V::reg w = V::broadcast(value);
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) sums[u] = V::fma(w, row + u * V::width, sums[u]);
  }
  // One record, the first `shared` inputs (even) of both rows.
  TWOFOUR_INLINE void add_record(const char* record, int shared, const Inputs& x) {
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
  static TWOFOUR_INLINE void finish(const typename V::reg (&sums)[U], bool first, float* y) {
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++)
      V::store_aligned(y + u * V::width, first ? sums[u] : sums[u] + V::load_aligned(y + u * V::width));
  }
};

// Weights soon needed into L1 and later ones into L2, and the sums of the pair after this one.
template <class V, int U>
TWOFOUR_INLINE void fetch_ahead(const uint8_t* head, const char* record, const float* sums) {
  for (int64_t line = 0; line < kPairRecord; line += 64) {
    __builtin_prefetch(record + kRecordsNear * kPairRecord + line);
    __builtin_prefetch(record + kRecordsFar * kPairRecord + line, 0, 2);
  }
  const float *a = sums + head[4] * U * V::width, *b = sums + head[5] * U * V::width;
  for (int64_t u = 0; u < U * V::width; u += 16) {
    __builtin_prefetch(a + u, 1);
    __builtin_prefetch(b + u, 1);
  }
}

// The lines that a domain's sums will be stored to, and those of what is added to them: fetched a few with every pair
// of rows, because all at once they wait for one another.
struct Lines {
  float* const* pixels;  // null where a lane has none
  int64_t count, row, rows;
  const float *y, *other;  // `other` may be null
  int64_t next = 0;

  TWOFOUR_INLINE void step(int64_t each) {
    for (const int64_t end = next + each < count ? next + each : count; next < end; next++) {
      if (pixels[next] == nullptr) continue;
      const float* to = pixels[next] + row;
      for (int64_t m = 0; m < rows; m += 16) __builtin_prefetch(to + m, 1);
      if (other == nullptr) continue;
      const float* from = other + (to - y);
      for (int64_t m = 0; m < rows; m += 16) __builtin_prefetch(from + m);
    }
  }
};

// One tile of `pairs` pairs of rows (a domain of the layout) with one panel of U vectors.
template <class V, int U, class Inputs>
TWOFOUR_NOINLINE void add_domain(const char* packed, int64_t pairs, const Inputs& x, bool first, float* sums,
                                 Lines* lines, bool* damaged) {
  const int64_t each = lines == nullptr ? 0 : (lines->count + pairs - 1) / pairs;
  const auto* head = reinterpret_cast<const uint8_t*>(packed);
  const char* record = packed + kPairHead;
  for (int64_t p = 0; p < pairs; p++, head += 4, record += kPairRecord) {
    if (!sound_pair<V>(head, record, pairs)) return report(damaged);
    fetch_ahead<V, U>(head, record, sums);
    if (each > 0) lines->step(each);
    ConvSums<V, U, Inputs> s;
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) s.a[u] = s.b[u] = V::zero();
    s.add_record(record, head[2], x);
    s.finish(s.a, first, sums + head[0] * U * V::width);
    s.finish(s.b, first, sums + head[1] * U * V::width);
  }
}

template <class V, class Inputs, int U>
void add_some(int used, const char* packed, int64_t pairs, const Inputs& x, bool first, float* sums, Lines* lines,
              bool* damaged) {
  if (used == U) return add_domain<V, U, Inputs>(packed, pairs, x, first, sums, lines, damaged);
  if constexpr (U > 1) add_some<V, Inputs, U - 1>(used, packed, pairs, x, first, sums, lines, damaged);
}

}  // namespace
