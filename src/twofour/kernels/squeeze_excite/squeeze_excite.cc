// The row, once for every instruction set.
#include "blocks.h"

namespace twofour {

void TWOFOUR_HERE(squeeze_excite_f32_blocks)(const SqueezeExcite& a) { SqueezeBlocks<Lanes>::run(a); }

}  // namespace twofour
