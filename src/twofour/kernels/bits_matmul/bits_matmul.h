// y[tokens, out] = epilogue(x[tokens, in] @ W^T + bias), x and W whole numbers of 1 to 8 bits: the table of kernels.
#pragma once

#include "kernels/matmul.h"
#include "native/table.h"

namespace twofour {

// One row of the table: correct for any tokens >= 0. Ask the CPU before anything of it is called.
struct BitsMatmulKernel : RowBase {
  int64_t (*workspace_bytes)(const Matmul&);
  void (*run)(const Matmul&);
};

#define TWOFOUR_ROW(symbol, ...)                   \
  int64_t symbol##__workspace(const Matmul& args); \
  void symbol(const Matmul& args);
#include "bits_matmul.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
