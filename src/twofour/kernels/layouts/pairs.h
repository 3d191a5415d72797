// The packed layout "pairs" of a 2:4 fp32 weight, drawn in ../nm_matmul/f32/README.md: its sizes.
#pragma once

#include <cstdint>

#include "panels.h"

namespace twofour {

// Domains of kPairRows output rows and kPanelTile inputs; inside one, rows are matched in twos that keep many
// inputs in common. Per domain and tile: kPairHead bytes (per pair: row, row, c, 0) and one record per pair: 64 values,
// then 64 bytes of inputs, first the c (even) that serve both rows, then one of each row in turn.
constexpr int64_t kPairRows = 96;
constexpr int64_t kPairHead = kPairRows / 2 * 4;
constexpr int64_t kPairRecord = kPanelTile * 4 + kPanelTile;
constexpr int64_t kPairTileBytes = kPairHead + kPairRows / 2 * kPairRecord;

// How many of the inputs that serve both rows no product has to read, even, in a tile of so many inputs, a multiple of 4. Groups
// past the weight's inputs keep the same two in all rows, so that they stand last among those that are shared; two stay, since
// of an odd number in common the last one, of padding, stands among those of one row.
constexpr int padding_of(int64_t inputs) { return inputs < kPanelTile - 4 ? static_cast<int>((kPanelTile - inputs) / 2 - 2) & ~1 : 0; }

}  // namespace twofour
