// The row, once for every instruction set.
#include "native/simd.h"
#include "nm_tiles_search.h"

namespace twofour {

bool TWOFOUR_HERE(nm_tiles_2x4_f32)(const NmTiles& a) { return search<Lanes>(a); }

}  // namespace twofour
