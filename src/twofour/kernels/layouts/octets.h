// The packed layout "int8_rows" of a 2:4 int8 weight, drawn in ../nm_matmul/int8/README.md, and the head of all int8 ones.
#pragma once

#include <cstdint>

#include "layout.h"
#include "rows.h"

namespace twofour {

// First 64 bytes of an int8 layout: the static range of its activations, where it has one (quantization.py writes it).
struct alignas(64) Int8Head {
  uint32_t is_static;
  float x_scale;
  int32_t x_zero;
};
static_assert(sizeof(Int8Head) == 64);

// "int8_rows": the head; the rows' scales (float); the rows' sums of weights (int32), by which the zero point of the
// activations is taken off; then units of 2 x 16 output rows and kRowTile inputs. Rows are padded to whole units.
// Each half of a unit holds 16 dwords of metadata, then for every 8 inputs the four kept values of 16 rows.
constexpr int64_t kOctetHalfBytes = kRowUnit * 4 + kRowTile / 8 * kRowUnit * 4;

inline int64_t int8_padded_rows(int64_t out) { return (out + 2 * kRowUnit - 1) / (2 * kRowUnit) * 2 * kRowUnit; }
inline int64_t int8_head_bytes(int64_t out) {
  return static_cast<int64_t>(sizeof(Int8Head)) + int8_padded_rows(out) * 8;
}

// Writes scales and sums behind a head that was zeroed.
void pack_int8_head(const WeightShape& shape, const CanonicalWeight& from, uint8_t* to);

}  // namespace twofour
