// The row with float activations, once for every instruction set that has no better one.
#include "float_rows.h"
#include "native/simd.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(nm_matmul_2x4_int4_rows)(const NmMatmul& a) { return Int4Floats<Lanes>::workspace(a); }
void TWOFOUR_HERE(nm_matmul_2x4_int4_rows)(const NmMatmul& a) { Int4Floats<Lanes>::run(a); }

}  // namespace twofour
