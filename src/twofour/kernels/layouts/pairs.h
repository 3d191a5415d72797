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

}  // namespace twofour
