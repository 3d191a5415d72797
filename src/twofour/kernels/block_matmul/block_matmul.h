// y[tokens, out] = epilogue(x[tokens, in] @ W^T + bias), W of blocks most of which are zero: the table of kernels.
#pragma once

#include "kernels/matmul.h"
#include "native/table.h"

namespace twofour {

struct BlockMatmulKernel : MatmulKernel {};

#define TWOFOUR_ROW(symbol, ...)                   \
  int64_t symbol##__workspace(const Matmul& args); \
  void symbol(const Matmul& args);
#include "block_matmul.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
