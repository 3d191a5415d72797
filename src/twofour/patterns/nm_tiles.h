// Masks that are 2:4 along both axes: the best of the 90 of every 4 x 4 tile.
#pragma once

#include <cstdint>

namespace twofour {

struct NmTiles {
  const float* scores;  // 4 * bands rows of `columns` values; columns % 4 == 0
  uint8_t* keep;        // same shape, 1 = kept
  int64_t bands, columns;
  bool absolute;  // rank by |score|
};

// Returns false when a score is NaN or infinite; `keep` is then unspecified.
struct NmTilesKernel {
  const char* name;
  const char* isa;
  bool (*run)(const NmTiles&);
};

#define TWOFOUR_NM_TILES(symbol, isa) bool symbol(const NmTiles&);
#include "nm_tiles.inc"
#undef TWOFOUR_NM_TILES

}  // namespace twofour
