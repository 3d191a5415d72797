// The two packed layouts of a 2:4 bfloat16 weight, drawn in README.md: their sizes and codes.
#pragma once

#include <cstdint>

namespace twofour {

// "bf16_panels": blocks of kBf16PanelRows output rows; in a block one tile per kBf16PanelTile inputs; in a tile the
// 64-bit metadata of every row, padded to 64 bytes, then kBf16PanelTile / 2 values per row.
// The metadata nibble of a group holds the input of its first value in the low two bits, that of its second above.
constexpr int64_t kBf16PanelRows = 384;
constexpr int64_t kBf16PanelTile = 64;

// The order in which a pair of inputs is written. Only (0, 1) ascends: so that 6 * group + nibble is another number
// for every group and pair, and a panel of pairs is addressed by the nibble alone and has no gaps.
constexpr unsigned kBf16AscendingCode = 4;
constexpr int kBf16PairsPerGroup = 6;
constexpr int kBf16LeastCode = 2, kBf16MostCode = 11;

// "bf16_rows": units of 2 x 16 output rows and kBf16RowTile inputs; each half holds 16 dwords of metadata (low words:
// the first inputs of 8 groups, high words: the second), then for every group of four inputs 16 pairs of values.
constexpr int64_t kBf16RowUnit = 16;
constexpr int64_t kBf16RowTile = 32;
constexpr int64_t kBf16HalfUnitBytes = kBf16RowUnit * 4 + kBf16RowTile / 4 * kBf16RowUnit * 4;

}  // namespace twofour
