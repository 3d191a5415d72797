// The rows that multiply bytes, for each instruction set of bits_conv.inc.
#include "conv.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(bits_conv_bytes)(const BitsConv& a) { return conv_workspace<ByteTiles<ByteDots>>(a); }
void TWOFOUR_HERE(bits_conv_bytes)(const BitsConv& a) { conv_images<ByteTiles<ByteDots>>(a); }

}  // namespace twofour
