// The row, once for every instruction set.
#include "native/simd.h"
#include "rows.h"

namespace twofour {

void TWOFOUR_HERE(nm_gradient_2x4)(const NmGradient& a) { prune_gradient<Lanes>(a); }

}  // namespace twofour
