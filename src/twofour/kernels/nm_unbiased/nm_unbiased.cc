// The row, once for every instruction set.
#include "estimate.h"
#include "native/simd.h"

namespace twofour {

void TWOFOUR_HERE(nm_unbiased_2x4)(const NmUnbiased& a) { estimate<Lanes>(a); }

}  // namespace twofour
