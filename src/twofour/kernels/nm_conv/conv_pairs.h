// The inner loops: one tile of 64 inputs of two output channels at a time, with a panel of up to 8 vectors of pixels.
//
// Weights are in the layout "pairs" (nm_matmul/README.md): an input that both channels keep is loaded once for two
// multiply-adds.
#pragma once

#include <cstdint>

#include "kernels/pair_sums.h"
#include "native/compiler.h"

namespace {

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

// One tile of `pairs` pairs of rows (a domain of the layout), which leave out `padding` inputs of those they share, with one panel
// of U vectors, the last one a half where it says so.
template <class V, int U, bool half, class Inputs>
TWOFOUR_NOINLINE void add_domain(const char* packed, int64_t pairs, int padding, const Inputs& x, bool first, float* sums,
                                 Lines* lines, bool* damaged) {
  const int64_t each = lines == nullptr ? 0 : (lines->count + pairs - 1) / pairs;
  const auto* head = reinterpret_cast<const uint8_t*>(packed);
  const char* record = packed + kPairHead;
  for (int64_t p = 0; p < pairs; p++, head += 4, record += kPairRecord) {
    if (!sound_pair<V>(head, record, pairs)) return report(damaged);
    fetch_ahead<V, U>(head, record, sums);
    if (each > 0) lines->step(each);
    PairSums<V, U, half, Inputs> s;
    s.clear();
    s.add_record(record, head[2], padding, x);
    s.a.finish(first, sums + head[0] * U * V::width);
    s.b.finish(first, sums + head[1] * U * V::width);
  }
}

// Vectors of a panel, and how many lanes of the last one hold pixels.
struct PanelFill {
  int64_t vectors, last;
};

template <class V, class Inputs, int U>
void add_some(const PanelFill& used, const char* packed, int64_t pairs, int padding, const Inputs& x, bool first, float* sums,
              Lines* lines, bool* damaged) {
  if (used.vectors == U) {
    if constexpr (HalfOf<V>::width > 0)
      if (used.last <= HalfOf<V>::width)
        return add_domain<V, U, true, Inputs>(packed, pairs, padding, x, first, sums, lines, damaged);
    return add_domain<V, U, false, Inputs>(packed, pairs, padding, x, first, sums, lines, damaged);
  }
  if constexpr (U > 1) add_some<V, Inputs, U - 1>(used, packed, pairs, padding, x, first, sums, lines, damaged);
}

}  // namespace
