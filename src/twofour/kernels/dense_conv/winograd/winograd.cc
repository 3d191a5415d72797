// The rows, once for every instruction set.
#include "native/simd.h"
#include "points.h"
#include "tiles.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(dense_conv_f32_winograd4)(const DenseConv& a) {
  return winograd_workspace<Lanes, Points4<Lanes>>(a);
}
void TWOFOUR_HERE(dense_conv_f32_winograd4)(const DenseConv& a) { winograd<Lanes, Points4<Lanes>>(a); }

int64_t TWOFOUR_WORKSPACE_HERE(dense_conv_f32_winograd2)(const DenseConv& a) {
  return winograd_workspace<Lanes, Points2<Lanes>>(a);
}
void TWOFOUR_HERE(dense_conv_f32_winograd2)(const DenseConv& a) { winograd<Lanes, Points2<Lanes>>(a); }

}  // namespace twofour
