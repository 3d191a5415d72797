// The packed layout "int8_rows" of a 2:4 int8 weight, drawn in ../nm_matmul/int8/README.md, and the head of all int8 ones.
#pragma once

#include <cstdint>

#include "layout.h"
#include "rows.h"

namespace twofour {

// "int8_rows": a head of the rows' scales (float) and the rows' sums of weights (int32), by which the zero point of the
// activations is taken off; then units of 2 x 16 output rows and kRowTile inputs. Rows are padded to whole units.
// Each half of a unit holds 16 dwords of metadata, then for every 8 inputs the four kept values of 16 rows.
constexpr int64_t kOctetHalfBytes = kRowUnit * 4 + kRowTile / 8 * kRowUnit * 4;

inline int64_t int8_padded_rows(int64_t out) { return (out + 2 * kRowUnit - 1) / (2 * kRowUnit) * 2 * kRowUnit; }
inline int64_t int8_head_bytes(int64_t out) { return int8_padded_rows(out) * 8; }

// Writes scales and sums into a head that was zeroed.
void pack_int8_head(const WeightShape& shape, const CanonicalWeight& from, uint8_t* to);

}  // namespace twofour
