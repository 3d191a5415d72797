// The sums of stripes.h, once for every instruction set: vectors of 16 that the compiler splits as the registers allow.
// Internal linkage, included once per instruction set.
#pragma once

#include "native/compiler.h"
#include "stripes.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("finite-math-only", "no-signed-zeros")  // of values that are finite and >= 0: max is one instruction
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors wider than the registers: no function here is called from elsewhere
#endif

namespace {

using twofour::kStripeChunk;
using twofour::kStripeLanes;
using twofour::MaxSums;
using twofour::StripeRest;
using twofour::SubsetSums;

using Lanes16 = float __attribute__((vector_size(64)));

TWOFOUR_INLINE Lanes16 larger(Lanes16 a, Lanes16 b) { return a > b ? a : b; }
TWOFOUR_INLINE Lanes16 smaller(Lanes16 a, Lanes16 b) { return a < b ? a : b; }
TWOFOUR_INLINE const Lanes16* lanes(const float* p) { return reinterpret_cast<const Lanes16*>(p); }
TWOFOUR_INLINE Lanes16* lanes(float* p) { return reinterpret_cast<Lanes16*>(p); }

// A tree, so that no sum waits for the one before.
TWOFOUR_INLINE double sum(const Lanes16& v) {
  double half[8];
  for (int i = 0; i < 8; ++i) half[i] = static_cast<double>(v[i]) + static_cast<double>(v[i + 8]);
  return ((half[0] + half[4]) + (half[2] + half[6])) + ((half[1] + half[5]) + (half[3] + half[7]));
}

// 64 vectors are added in float32, 1024 rows; longer sums in float64.
constexpr int64_t kFlush = 64;

// Keeps the n largest of the values pushed, largest first.
struct Largest {
  Lanes16 kept[64];
  int n;
  TWOFOUR_INLINE void clear(int count) {
    n = count;
    for (int i = 0; i < n; ++i) kept[i] = Lanes16{};
  }
  TWOFOUR_INLINE void push(Lanes16 value) {
    for (int i = 0; i < n; ++i) {
      const Lanes16 before = kept[i];
      kept[i] = larger(before, value);
      value = smaller(before, value);
    }
  }
};

// 2:4: the two largest of a, b, c, d sum to max(max(a, b) + max(c, d), a + b, c + d).
void chunk_of_pairs(const SubsetSums& a, int64_t from, int64_t vectors) {
  Lanes16* const sums = lanes(a.scratch);
  Lanes16* const larger_of = sums + a.count;
  Lanes16* const both = larger_of + a.width * (a.width - 1) / 2 * kStripeChunk;
  for (int d = 1, pair = 0; d < a.width; ++d)
    for (int c = 0; c < d; ++c, ++pair)
      for (int64_t v = 0; v < vectors; ++v) {
        const Lanes16 x = lanes(a.columns[c])[from + v], y = lanes(a.columns[d])[from + v];
        larger_of[pair * kStripeChunk + v] = larger(x, y);
        both[pair * kStripeChunk + v] = x + y;
      }
  for (int64_t s = 0; s < a.count; ++s) {
    const uint8_t* const subset = a.subsets + 4 * s;
    const int64_t first = (subset[1] * (subset[1] - 1) / 2 + subset[0]) * kStripeChunk;
    const int64_t second = (subset[3] * (subset[3] - 1) / 2 + subset[2]) * kStripeChunk;
    const Lanes16 *m1 = larger_of + first, *m2 = larger_of + second, *s1 = both + first, *s2 = both + second;
    Lanes16 total = sums[s];
    for (int64_t v = 0; v < vectors; ++v) total += larger(m1[v] + m2[v], larger(s1[v], s2[v]));
    sums[s] = total;
  }
}

void chunk_of_any(const SubsetSums& a, int64_t from, int64_t vectors) {
  Lanes16* const sums = lanes(a.scratch);
  Largest largest;
  for (int64_t s = 0; s < a.count; ++s)
    for (int64_t v = from; v < from + vectors; ++v) {
      largest.clear(a.n);
      for (int i = 0; i < a.m; ++i) largest.push(lanes(a.columns[a.subsets[a.m * s + i]])[v]);
      for (int i = 0; i < a.n; ++i) sums[s] += largest.kept[i];
    }
}

void subset_sums(const SubsetSums& a) {
  const bool pairs = a.n == 2 && a.m == 4;
  const int64_t vectors = a.rows / kStripeLanes;
  Lanes16* const sums = lanes(a.scratch);
  for (int64_t s = 0; s < a.count; ++s) a.sums[s] = 0;
  for (int64_t start = 0; start < vectors; start += kFlush) {
    const int64_t stop = start + kFlush < vectors ? start + kFlush : vectors;
    for (int64_t s = 0; s < a.count; ++s) sums[s] = Lanes16{};
    for (int64_t v = start; v < stop; v += kStripeChunk) {
      const int64_t count = stop - v < kStripeChunk ? stop - v : kStripeChunk;
      pairs ? chunk_of_pairs(a, v, count) : chunk_of_any(a, v, count);
    }
    for (int64_t s = 0; s < a.count; ++s) a.sums[s] += sum(sums[s]);
  }
}

double stripe_rest(const StripeRest& a) {
  const int64_t vectors = a.rows / kStripeLanes;
  Largest largest;
  double total = 0;
  for (int64_t start = 0; start < vectors; start += kFlush) {
    Lanes16 part = {};
    for (int64_t v = start; v < vectors && v < start + kFlush; ++v) {
      largest.clear(a.n);
      for (int i = 0; i < a.m - 1; ++i) largest.push(lanes(a.columns[i])[v]);
      for (int i = 0; i < a.n - 1; ++i) part += largest.kept[i];
      lanes(a.least)[v] = largest.kept[a.n - 1];
    }
    total += sum(part);
  }
  return total;
}

// kStripes x kColumns sums in registers over the vectors [start, stop).
template <int kStripes, int kColumns>
TWOFOUR_INLINE void tile_of_maxima(const MaxSums& a, int64_t s, int64_t j, int64_t start, int64_t stop) {
  Lanes16 sums[kStripes][kColumns] = {};
  for (int64_t v = start; v < stop; ++v) {
    Lanes16 x[kColumns];
    TWOFOUR_UNROLL
    for (int c = 0; c < kColumns; ++c) x[c] = lanes(a.columns[j + c])[v];
    TWOFOUR_UNROLL
    for (int i = 0; i < kStripes; ++i) {
      const Lanes16 least = lanes(a.least + (s + i) * a.rows)[v];
      TWOFOUR_UNROLL
      for (int c = 0; c < kColumns; ++c) sums[i][c] += larger(least, x[c]);
    }
  }
  for (int i = 0; i < kStripes; ++i)
    for (int c = 0; c < kColumns; ++c) a.out[(s + i) * a.count + j + c] += sum(sums[i][c]);
}

template <int kStripes>
TWOFOUR_INLINE void row_of_maxima(const MaxSums& a, int64_t s, int64_t j, int64_t last, int64_t start, int64_t stop) {
  for (; j + 4 <= last; j += 4) tile_of_maxima<kStripes, 4>(a, s, j, start, stop);
  for (; j < last; ++j) tile_of_maxima<kStripes, 1>(a, s, j, start, stop);
}

void max_sums(const MaxSums& a) {
  constexpr int64_t kBlock = 64;  // columns of 1024 rows that stay in the second cache
  const int64_t vectors = a.rows / kStripeLanes;
  for (int64_t i = a.begin * a.count; i < a.end * a.count; ++i) a.out[i] = 0;
  for (int64_t start = 0; start < vectors; start += kFlush) {
    const int64_t stop = start + kFlush < vectors ? start + kFlush : vectors;
    for (int64_t j = 0; j < a.count; j += kBlock) {
      const int64_t last = j + kBlock < a.count ? j + kBlock : a.count;
      int64_t s = a.begin;
      for (; s + 4 <= a.end; s += 4) row_of_maxima<4>(a, s, j, last, start, stop);
      for (; s < a.end; ++s) row_of_maxima<1>(a, s, j, last, start, stop);
    }
  }
}

}  // namespace
