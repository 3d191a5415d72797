// The row that looks sums of four codes up by a shuffle of bytes.
#include "fours.h"

#include "bits_matmul.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(bits_matmul_fours)(const Matmul& a) { return fours_workspace(a); }
void TWOFOUR_HERE(bits_matmul_fours)(const Matmul& a) { fours_product<FourLookups>(a); }

}  // namespace twofour
