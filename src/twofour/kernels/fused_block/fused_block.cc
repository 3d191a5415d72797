// The rows, for each instruction set of fused_block.inc.
#include "tiles.h"

namespace twofour {

void TWOFOUR_HERE(fused_block_f32_tiles)(const Block& block, float* scratch, int64_t begin, int64_t end) {
  Tiles<Lanes>(block, scratch).run(begin, end);
}

}  // namespace twofour
