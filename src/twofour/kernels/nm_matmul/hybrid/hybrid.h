// y[tokens, out] = epilogue(x[tokens, in] @ W^T + bias), W of two regions: 2:4, and groups of inputs that are dense. A dense
// group of four inputs is two groups of 2:4 on the same inputs, so the product is one of 2:4 over inputs of which those of the
// dense groups stand there twice.
#pragma once

#include <cstdint>

#include "kernels/matmul.h"
#include "native/table.h"

namespace twofour {

struct HybridMatmulKernel : MatmulKernel {};

#define TWOFOUR_ROW(symbol, ...)                   \
  int64_t symbol##__workspace(const Matmul& args); \
  void symbol(const Matmul& args);
#include "hybrid.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
