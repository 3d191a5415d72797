// The packed layouts "panels" (float32) and "bf16_panels" of a 2:4 weight: their sizes and codes.
#pragma once

#include <cstdint>

#include "native/integers.h"

namespace twofour {

// Blocks of kPanelRows output rows; in a block one tile per kPanelTile inputs; in a tile the 64-bit metadata of every row,
// padded to 64 bytes, then kPanelTile / 2 values per row. In bfloat16 the metadata nibble of a group holds the input of its
// first value in the low two bits, that of its second above, in an order of its own:
constexpr int64_t kPanelRows = 384;
constexpr int64_t kPanelTile = 64;

// The order in which a pair of inputs is written. Only (0, 1) ascends: so that 6 * group + nibble is another number
// for every group and pair, and a panel of pairs is addressed by the nibble alone and has no gaps.
constexpr unsigned kBf16AscendingCode = 4;
constexpr int kBf16PairsPerGroup = 6;
constexpr int kBf16LeastCode = 2, kBf16MostCode = 11;

}  // namespace twofour

namespace {

// The block that holds `row` of a packed weight (out, in) of values of kValueBytes, and where its tiles stand.
template <int kValueBytes, class Byte>
struct PanelBlock {
  static constexpr int64_t kRowBytes = twofour::kPanelTile / 2 * kValueBytes;  // the values of a row in a tile
  int64_t first, rows, meta_bytes, tile_bytes;
  Byte* tiles;

  PanelBlock(Byte* packed, int64_t row, int64_t out, int64_t in) {
    first = row / twofour::kPanelRows * twofour::kPanelRows;
    rows = least(twofour::kPanelRows, out - first);
    meta_bytes = round_up(rows * 8, 64);
    tile_bytes = bytes_of_tile(rows);
    tiles = packed + first * ceil_div(in, twofour::kPanelTile) * (8 + kRowBytes);
  }
  static constexpr int64_t bytes_of_tile(int64_t rows) { return round_up(rows * 8, 64) + rows * kRowBytes; }
  // Of the block's r-th row.
  Byte* meta(int64_t tile, int64_t r) const { return tiles + tile * tile_bytes + r * 8; }
  Byte* values(int64_t tile, int64_t r) const { return tiles + tile * tile_bytes + meta_bytes + r * kRowBytes; }
};

}  // namespace
