// The row, once for every instruction set.
#include "native/simd.h"
#include "sampled.h"

namespace twofour {

void TWOFOUR_HERE(nm_sddmm_2x4_f32)(const NmSddmm& a) { sample<Lanes>(a); }

}  // namespace twofour
