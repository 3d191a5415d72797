// y[tokens, out] = epilogue(x[tokens, in] @ W^T + bias), W 2:4 sparse and packed: the table of kernels.
#pragma once

#include <cstdint>

#include "kernels/layouts/layout.h"
#include "kernels/matmul.h"
#include "native/table.h"

namespace twofour {

// One row of the table. Every kernel is correct for any tokens >= 0, out_features >= 1, in_features a multiple of 4;
// Both functions run the row's instructions: ask the CPU first.
struct NmMatmulKernel : MatmulKernel {
  const Layout* order;  // the layout of that name
};

#define TWOFOUR_ROW(symbol, ...)                   \
  int64_t symbol##__workspace(const Matmul& args); \
  void symbol(const Matmul& args);
#include "nm_matmul.inc"
#undef TWOFOUR_ROW

extern const NmMatmulKernel kNmMatmulKernels[];
extern const int kNmMatmulKernelCount;

}  // namespace twofour
