// The three packed layouts of a 2:4 fp32 weight (drawn in README.md): sizes, packing from the canonical form and back.
#pragma once

#include <cstdint>

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

enum class Layout { panels, pairs, rows };

// False when no layout has that name.
bool layout_from_name(const char* name, Layout* layout);

// Bytes of a packed weight; a multiple of 64. out >= 1, in a positive multiple of 4.
int64_t layout_bytes(Layout layout, int64_t out, int64_t in);

// Canonical form -> `packed` (layout_bytes long, every byte is written). values: out x in/2, kept values in order;
// indices: out x ceil(in/8) bytes, one nibble per group of four, low nibble first, its low two bits the first index.
void layout_pack(Layout layout, const float* values, const uint8_t* indices, int64_t out, int64_t in, void* packed);

// The inverse; the unused nibble of a row with an odd number of groups becomes 0.
void layout_unpack(Layout layout, const void* packed, int64_t out, int64_t in, float* values, uint8_t* indices);

}  // namespace twofour
