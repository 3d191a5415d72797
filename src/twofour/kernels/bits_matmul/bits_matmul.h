// y[tokens, out] = epilogue(x[tokens, in] @ W^T + bias), x and W whole numbers of 1 to 8 bits: the table of kernels.
#pragma once

#include "kernels/matmul.h"
#include "native/table.h"

namespace twofour {

struct BitsMatmulKernel : MatmulKernel {};

#define TWOFOUR_ROW(symbol, ...)                   \
  int64_t symbol##__workspace(const Matmul& args); \
  void symbol(const Matmul& args);
#include "bits_matmul.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
