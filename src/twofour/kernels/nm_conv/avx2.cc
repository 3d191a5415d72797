// The AVX2 + FMA row.
#include "conv_blocks.h"
#include "native/lanes_avx2.h"

namespace {

struct Vec : Lanes {
  // A NaN stays one: the second operand wins.
  static reg relu(reg v) { return _mm256_max_ps(zero(), v); }
};

}  // namespace

namespace twofour {

int64_t nm_conv_2x4_f32_blocks__avx2__workspace(const NmConv& a) { return conv_blocks_workspace<Vec, 4>(a); }
void nm_conv_2x4_f32_blocks__avx2(const NmConv& a) { conv_blocks<Vec, 4>(a); }

}  // namespace twofour
