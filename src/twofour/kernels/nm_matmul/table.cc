// The array of kernels, from the same rows that declare them.
#include "nm_matmul.h"

namespace twofour {

#define TWOFOUR_NM_MATMUL_ROW(symbol, isa, layout, tokens_min, tokens_max) \
  {#symbol, isa, layout, tokens_min, tokens_max, symbol##__workspace, symbol},
const NmMatmulKernel kNmMatmulKernels[] = {
#include "nm_matmul.inc"
};
#undef TWOFOUR_NM_MATMUL_ROW

const int kNmMatmulKernelCount = static_cast<int>(sizeof(kNmMatmulKernels) / sizeof(kNmMatmulKernels[0]));

}  // namespace twofour
