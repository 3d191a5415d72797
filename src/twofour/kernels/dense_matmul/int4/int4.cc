// The row of the dense int4 weight with float activations, for instruction sets that have no better one.
#include "kernels/dense_matmul/dense_matmul.h"
#include "kernels/int4/float_rows.h"
#include "native/simd.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(dense_matmul_int4_rows)(const Matmul& a) {
  return Int4Floats<Lanes, true>::workspace(a);
}
void TWOFOUR_HERE(dense_matmul_int4_rows)(const Matmul& a) { Int4Floats<Lanes, true>::run(a); }

}  // namespace twofour
