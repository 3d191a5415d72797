// The row with float activations, once for every instruction set that has no better one.
#include "kernels/int4/float_rows.h"
#include "kernels/nm_matmul/nm_matmul.h"
#include "native/simd.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(nm_matmul_2x4_int4_rows)(const Matmul& a) { return Int4Floats<Lanes>::workspace(a); }
void TWOFOUR_HERE(nm_matmul_2x4_int4_rows)(const Matmul& a) { Int4Floats<Lanes>::run(a); }

}  // namespace twofour
