// y[tokens, out] = epilogue(x[tokens, in] @ W^T + bias), W dense: int4, which torch has no fair kernel for, and float32.
#pragma once

#include "kernels/matmul.h"

namespace twofour {

struct DenseMatmulKernel : MatmulKernel {};

#define TWOFOUR_ROW(symbol, ...)                   \
  int64_t symbol##__workspace(const Matmul& args); \
  void symbol(const Matmul& args);
#include "dense_matmul.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
