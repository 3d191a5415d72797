// The row, once for every instruction set.
#include "native/simd.h"
#include "taps.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(nm_conv_gradient_2x4_f32)(const NmConvGradient& a) { return TapPlan<Lanes>(a).bytes(a); }
void TWOFOUR_HERE(nm_conv_gradient_2x4_f32)(const NmConvGradient& a) { sum_taps<Lanes>(a); }

}  // namespace twofour
