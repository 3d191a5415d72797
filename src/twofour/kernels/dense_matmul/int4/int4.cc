// The rows of the dense int4 weight of every set but AMX: fixed point where there is VNNI, float activations elsewhere.
#include "kernels/byte_dots.h"
#include "kernels/dense_matmul/dense_matmul.h"
#if defined(TWOFOUR_VNNI)
#include "products.h"
#else
#include "kernels/int4/float_rows.h"
#include "native/simd.h"
#endif

namespace twofour {

#if defined(TWOFOUR_VNNI)
int64_t TWOFOUR_WORKSPACE_HERE(dense_matmul_int4_rows)(const Matmul& a) { return row_products_workspace<Dense>(a); }
void TWOFOUR_HERE(dense_matmul_int4_rows)(const Matmul& a) { row_products<Dense>(a); }
#else
int64_t TWOFOUR_WORKSPACE_HERE(dense_matmul_int4_rows)(const Matmul& a) {
  return Int4Floats<Lanes, true>::workspace(a);
}
void TWOFOUR_HERE(dense_matmul_int4_rows)(const Matmul& a) { Int4Floats<Lanes, true>::run(a); }
#endif

}  // namespace twofour
