// The row, once for every instruction set.
#include "depthwise.h"

namespace twofour {

void TWOFOUR_HERE(depthwise_conv_f32_taps)(const Depthwise& a, int64_t begin, int64_t end) {
  DepthwiseRows<Lanes>::run(a, begin, end);
}

}  // namespace twofour
