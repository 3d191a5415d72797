// The row, once for every instruction set.
#include "blocks.h"
#include "native/simd.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(dense_conv_f32_direct)(const DenseConv& a) { return direct_workspace<Lanes>(a); }
void TWOFOUR_HERE(dense_conv_f32_direct)(const DenseConv& a) { direct<Lanes>(a); }

}  // namespace twofour
