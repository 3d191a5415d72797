// The rows, once for every instruction set: what a call says of inputs that stand twice makes the difference.
#include "conv_blocks.h"
#include "native/simd.h"

namespace {

constexpr int kWide = Lanes::width == 16 ? 8 : 4;

}  // namespace

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(nm_conv_2x4_f32_blocks)(const NmConv& a) { return conv_blocks_workspace<Lanes, kWide>(a); }
void TWOFOUR_HERE(nm_conv_2x4_f32_blocks)(const NmConv& a) { conv_blocks<Lanes, kWide>(a); }

int64_t TWOFOUR_WORKSPACE_HERE(hybrid_conv_f32_blocks)(const NmConv& a) { return TWOFOUR_WORKSPACE_HERE(nm_conv_2x4_f32_blocks)(a); }
void TWOFOUR_HERE(hybrid_conv_f32_blocks)(const NmConv& a) { TWOFOUR_HERE(nm_conv_2x4_f32_blocks)(a); }

}  // namespace twofour
