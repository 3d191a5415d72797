// The packed layouts "rows" (float32) and "bf16_rows" of a 2:4 weight, drawn in ../nm_matmul/f32/README.md and
// ../nm_matmul/bf16/README.md, and the units of every layout whose kernels hold output rows in vectors.
#pragma once

#include <cstdint>

#include "layout.h"

namespace twofour {

// Units of 2 x kRowUnit output rows and kRowTile inputs; each half holds 16 dwords of metadata, then values.
constexpr int64_t kRowUnit = 16;
constexpr int64_t kRowTile = 32;

// "rows": for every group of four inputs the first values of 16 rows and the second values of 16 rows.
constexpr int64_t kRowHalfBytes = kRowUnit * 4 + kRowTile / 2 * kRowUnit * 4;

// "bf16_rows": metadata with the first inputs of 8 groups in the low words, the second in the high words; then for every
// group of four inputs 16 pairs of values.
constexpr int64_t kBf16HalfBytes = kRowUnit * 4 + kRowTile / 4 * kRowUnit * 4;

}  // namespace twofour

namespace {

using twofour::kRowTile;
using twofour::kRowUnit;
using twofour::WeightShape;

// Calls visit(half unit, first row, k) for every half unit of kHalfBytes, in memory order.
template <int64_t kHalfBytes, class Byte, class Visit>
void for_each_half_unit(Byte* units, const WeightShape& shape, const Visit& visit) {
  for (int64_t row = 0; row < shape.out; row += 2 * kRowUnit)
    for (int64_t k = 0; k < shape.in; k += kRowTile)
      for (int64_t half = 0; half < 2; half++, units += kHalfBytes) visit(units, row + half * kRowUnit, k);
}

}  // namespace
