// The rows of every set but AMX: fixed point where there is VNNI, float activations elsewhere; panels of fixed point.
#include "kernels/byte_dots.h"
#include "kernels/nm_matmul/nm_matmul.h"
#if defined(TWOFOUR_VNNI)
#include "products.h"
#else
#include "kernels/int4/float_rows.h"
#include "native/simd.h"
#endif
#if defined(TWOFOUR_SET_avx2)
#include "panels.h"
#endif

namespace twofour {

#if defined(TWOFOUR_VNNI)
int64_t TWOFOUR_WORKSPACE_HERE(nm_matmul_2x4_int4_rows)(const Matmul& a) { return row_products_workspace<Sparse>(a); }
void TWOFOUR_HERE(nm_matmul_2x4_int4_rows)(const Matmul& a) { row_products<Sparse>(a); }
#else
int64_t TWOFOUR_WORKSPACE_HERE(nm_matmul_2x4_int4_rows)(const Matmul& a) { return Int4Floats<Lanes>::workspace(a); }
void TWOFOUR_HERE(nm_matmul_2x4_int4_rows)(const Matmul& a) { Int4Floats<Lanes>::run(a); }
#endif
#if defined(TWOFOUR_SET_avx2) && !defined(TWOFOUR_SET_avx512_vbmi)  // which has nothing that they need
int64_t TWOFOUR_WORKSPACE_HERE(nm_matmul_2x4_int4_panels)(const Matmul& a) { return PromptPlan(a).bytes(a); }
void TWOFOUR_HERE(nm_matmul_2x4_int4_panels)(const Matmul& a) { prompt_product(a); }
#endif

}  // namespace twofour
