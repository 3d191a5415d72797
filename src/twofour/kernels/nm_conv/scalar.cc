// The portable row: 128-bit vectors as GCC and clang write them, lowered to SSE2, NEON or plain scalar code.
#include "conv_blocks.h"
#include "native/lanes_portable.h"

namespace {

struct Vec : Lanes {
  static reg relu(reg v) { return v < zero() ? zero() : v; }
};

}  // namespace

namespace twofour {

int64_t nm_conv_2x4_f32_blocks__scalar__workspace(const NmConv& a) { return conv_blocks_workspace<Vec, 4>(a); }
void nm_conv_2x4_f32_blocks__scalar(const NmConv& a) { conv_blocks<Vec, 4>(a); }

}  // namespace twofour
