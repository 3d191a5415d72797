// The three packed layouts of a 2:4 fp32 weight, drawn in ../README.md: their sizes; and how its kernels see a call.
#pragma once

#include <cstdint>

#include "kernels/nm_matmul/nm_matmul.h"

namespace twofour {

// "panels": blocks of kPanelRows output rows; in a block one tile per kPanelTile inputs; in a tile the 64-bit metadata
// of every row, padded to 64 bytes, then kPanelTile / 2 values per row.
constexpr int64_t kPanelRows = 384;
constexpr int64_t kPanelTile = 64;

// "pairs": domains of kPairRows output rows and kPanelTile inputs; inside one, rows are matched in twos that keep many
// inputs in common. Per domain and tile: kPairHead bytes (per pair: row, row, c, 0) and one record per pair: 64 values,
// then 64 bytes of inputs, first the c (even) that serve both rows, then one of each row in turn.
constexpr int64_t kPairRows = 96;
constexpr int64_t kPairHead = kPairRows / 2 * 4;
constexpr int64_t kPairRecord = kPanelTile * 4 + kPanelTile;
constexpr int64_t kPairTileBytes = kPairHead + kPairRows / 2 * kPairRecord;

// "rows": units of 2 x 16 output rows and kRowTile inputs; each half holds 16 dwords of metadata, then for every group
// of four inputs the first values of 16 rows and the second values of 16 rows.
constexpr int64_t kRowUnit = 16;
constexpr int64_t kRowTile = 32;
constexpr int64_t kRowUnitBytes = kRowUnit * 4 + kRowTile / 2 * kRowUnit * 4;

}  // namespace twofour

namespace {

inline const float* x_of(const twofour::NmMatmul& a) { return static_cast<const float*>(a.x); }
inline float* y_of(const twofour::NmMatmul& a) { return static_cast<float*>(a.y); }

}  // namespace
