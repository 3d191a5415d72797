// The row that looks sums up, by permutations of bytes.
#include "lookups.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(bits_conv_lookups)(const BitsConv& a) { return conv_workspace<LookupTiles>(a); }
void TWOFOUR_HERE(bits_conv_lookups)(const BitsConv& a) { conv_images<LookupTiles>(a); }

}  // namespace twofour
