// The rows, for each instruction set of dense_matmul.inc.
#include "kernels/dense_matmul/dense_matmul.h"
#include "native/simd.h"
#include "panels.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(dense_matmul_f32_panels)(const Matmul& a) { return dense_panels_workspace<Lanes>(a); }
void TWOFOUR_HERE(dense_matmul_f32_panels)(const Matmul& a) { dense_panels<Lanes>(a); }

}  // namespace twofour
