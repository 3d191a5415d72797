// Masks that are 2:4 along both axes: the best of the 90 of every 4 x 4 tile.
#pragma once

#include <cstdint>

#include "native/table.h"

namespace twofour {

struct NmTiles {
  const float* scores;  // 4 * bands rows of `columns` values; columns % 4 == 0
  uint8_t* keep;        // same shape, 1 = kept
  int64_t bands, columns;
  bool absolute;  // rank by |score|
};

// Returns false when a score is NaN or infinite; `keep` is then unspecified.
using NmTilesKernel = KernelRow<bool(const NmTiles&)>;

#define TWOFOUR_ROW(symbol, ...) bool symbol(const NmTiles&);
#include "nm_tiles.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
