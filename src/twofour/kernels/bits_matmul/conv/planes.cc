// The rows that count bits, for each instruction set of bits_conv.inc.
#include "conv.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(bits_conv_planes)(const BitsConv& a) { return conv_workspace<PlaneTiles<PlaneCounts>>(a); }
void TWOFOUR_HERE(bits_conv_planes)(const BitsConv& a) { conv_images<PlaneTiles<PlaneCounts>>(a); }

}  // namespace twofour
