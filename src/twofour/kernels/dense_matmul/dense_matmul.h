// y[tokens, out] = epilogue(x[tokens, in] @ W^T + bias), W dense, in every computing type.
#pragma once

#include "kernels/matmul.h"

namespace twofour {

constexpr int64_t kDensePanel = 32;  // outputs of a panel: a layout's rows are padded to whole ones

struct DenseMatmulKernel : MatmulKernel {};

#define TWOFOUR_ROW(symbol, ...)                   \
  int64_t symbol##__workspace(const Matmul& args); \
  void symbol(const Matmul& args);
#include "dense_matmul.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
