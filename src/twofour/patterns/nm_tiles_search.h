// The exact search of a 4 x 4 tile, one tile in each lane of a vector. Included once per instruction set; internal linkage.
//
// Two upper rows keep 0, 1 or 2 values of a column and the two lower ones the rest: 19 kinds of masks, and in each the
// upper and the lower rows are chosen apart. 72 sums of two rows, 52 comparisons for the best of 90.
#pragma once

#include <cstdint>
#include <cstring>

#include "native/compiler.h"
#include "nm_tiles.h"

namespace {

using twofour::NmTiles;

// What a row may keep, as bits; the complement of pair p is pair 5 - p.
constexpr int kPairBits[6] = {3, 5, 9, 6, 10, 12};
constexpr int kPairColumns[6][2] = {{0, 1}, {0, 2}, {0, 3}, {1, 2}, {1, 3}, {2, 3}};

template <class V>
struct Best {
  typename V::F value;
  typename V::I bits;

  static TWOFOUR_INLINE Best of(typename V::F value, int bits) { return {value, typename V::I{} + bits}; }
  // The first of equals stays.
  TWOFOUR_INLINE void take(const Best& other) {
    const typename V::I better = other.value > value;
    value = better ? other.value : value;
    bits = better ? other.bits : bits;
  }
};

// Sums of every pair of a row.
template <class V>
struct RowPairs {
  typename V::F of[6];

  explicit TWOFOUR_INLINE RowPairs(const typename V::F (&x)[4]) {
    TWOFOUR_UNROLL
    for (int p = 0; p < 6; p++) of[p] = x[kPairColumns[p][0]] + x[kPairColumns[p][1]];
  }
};

// Row a keeps pair p, row b pair q.
template <class V>
TWOFOUR_INLINE Best<V> two_rows(const RowPairs<V>& a, const RowPairs<V>& b, int p, int q) {
  return Best<V>::of(a.of[p] + b.of[q], kPairBits[p] | kPairBits[q] << 4);
}
template <class V>
TWOFOUR_INLINE Best<V> apart(const RowPairs<V>& a, const RowPairs<V>& b) {
  Best<V> best = two_rows(a, b, 0, 5);
  TWOFOUR_UNROLL
  for (int p = 1; p < 6; p++) best.take(two_rows(a, b, p, 5 - p));
  return best;
}
template <class V>
TWOFOUR_INLINE Best<V> either(const RowPairs<V>& a, const RowPairs<V>& b, int p, int q) {
  Best<V> best = two_rows(a, b, p, q);
  best.take(two_rows(a, b, q, p));
  return best;
}
template <class V>
TWOFOUR_INLINE Best<V> both(const Best<V>& upper, const Best<V>& lower) {
  return {upper.value + lower.value, upper.bits | lower.bits << 8};
}

// The 16 bits of the best mask of every lane's tile, row by row. The order of the kinds is the reference's.
template <class V>
TWOFOUR_INLINE typename V::I best_mask(const typename V::F (&x)[4][4]) {
  const RowPairs<V> r0(x[0]), r1(x[1]), r2(x[2]), r3(x[3]);
  Best<V> best = both(two_rows(r0, r1, 0, 0), two_rows(r2, r3, 5, 5));
  TWOFOUR_UNROLL
  for (int p = 1; p < 6; p++) best.take(both(two_rows(r0, r1, p, p), two_rows(r2, r3, 5 - p, 5 - p)));
  best.take(both(apart(r0, r1), apart(r2, r3)));
  TWOFOUR_UNROLL
  for (int p = 0; p < 6; p++) {
    TWOFOUR_UNROLL
    for (int q = p + 1; q < 6; q++)
      if (p + q != 5) best.take(both(either(r0, r1, p, q), either(r2, r3, 5 - p, 5 - q)));
  }
  return best.bits;
}

// Four rows of 4 * width columns, `stride` floats apart -> their keep bytes, in rows `to_stride` apart. `largest`
// collects the largest magnitude seen.
template <class V, bool kAbsolute>
TWOFOUR_INLINE void search_tiles(const float* scores, int64_t stride, uint8_t* keep, int64_t to_stride,
                                 typename V::I* largest) {
  typename V::F x[4][4];
  TWOFOUR_UNROLL
  for (int r = 0; r < 4; r++) {
    TWOFOUR_UNROLL
    for (int c = 0; c < 4; c++) {
      typename V::I bits;
      std::memcpy(&bits, scores + r * stride + c * V::width, sizeof bits);
      const typename V::I magnitude = bits & 0x7fffffff;
      *largest = magnitude > *largest ? magnitude : *largest;
      x[r][c] = (typename V::F)(kAbsolute ? magnitude : bits);
    }
    V::transpose_quarters(x[r]);  // now column c of the tiles in x[r][c], of each quarter of the lanes in turn
  }
  const typename V::I mask = (typename V::I)V::from_quarters((typename V::ireg)best_mask<V>(x));
  TWOFOUR_UNROLL
  for (int r = 0; r < 4; r++) {
    const typename V::I row = (mask >> (4 * r)) & 15;  // bit i of it becomes byte i
    const typename V::I bytes = (row | row << 7 | row << 14 | row << 21) & 0x01010101;
    std::memcpy(keep + r * to_stride, &bytes, sizeof bytes);
  }
}

template <class V, bool kAbsolute>
TWOFOUR_INLINE bool search_as(const NmTiles& a) {
  constexpr int64_t span = 4 * V::width;
  typename V::I largest{};
  for (int64_t band = 0; band < a.bands; band++) {
    const float* from = a.scores + 4 * band * a.columns;
    uint8_t* to = a.keep + 4 * band * a.columns;
    int64_t c = 0;
    for (; c + span <= a.columns; c += span)
      search_tiles<V, kAbsolute>(from + c, a.columns, to + c, a.columns, &largest);
    if (c == a.columns) continue;
    float rest[4][span] = {};
    uint8_t kept[4][span];
    const size_t left = static_cast<size_t>(a.columns - c);
    for (int r = 0; r < 4; r++) std::memcpy(rest[r], from + r * a.columns + c, left * 4);
    search_tiles<V, kAbsolute>(rest[0], span, kept[0], span, &largest);
    for (int r = 0; r < 4; r++) std::memcpy(to + r * a.columns + c, kept[r], left);
  }
  for (int i = 0; i < V::width; i++)
    if (largest[i] >= 0x7f800000) return false;  // infinity is the smallest magnitude that is not finite
  return true;
}

template <class V>
TWOFOUR_INLINE bool search(const NmTiles& a) {
  return a.absolute ? search_as<V, true>(a) : search_as<V, false>(a);
}

}  // namespace
