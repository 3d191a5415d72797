// The AVX-512 row.
#include "conv_blocks.h"
#include "native/lanes_avx512.h"

namespace {

struct Vec : Lanes {
  // A NaN stays one: the second operand wins.
  static reg relu(reg v) { return _mm512_max_ps(zero(), v); }
};

}  // namespace

namespace twofour {

int64_t nm_conv_2x4_f32_blocks__avx512__workspace(const NmConv& a) { return conv_blocks_workspace<Vec, 8>(a); }
void nm_conv_2x4_f32_blocks__avx512(const NmConv& a) { conv_blocks<Vec, 8>(a); }

}  // namespace twofour
