// The array of kernels, from the same rows that declare them.
#include "nm_matmul.h"

namespace twofour {

#define TWOFOUR_ROW(symbol, isa, pattern, dtype, layout, least, most)                                   \
  {{{#symbol, "nm_matmul", isa, pattern, dtype, layout, least, most}, symbol##__workspace, symbol}, layout_called(layout)},
const NmMatmulKernel kNmMatmulKernels[] = {
#include "nm_matmul.inc"
};
#undef TWOFOUR_ROW

const int kNmMatmulKernelCount = static_cast<int>(sizeof(kNmMatmulKernels) / sizeof(kNmMatmulKernels[0]));

}  // namespace twofour
