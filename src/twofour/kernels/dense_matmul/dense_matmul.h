// y[tokens, out] = epilogue(x[tokens, in] @ W^T + bias), W dense in an encoding that torch has no fair kernel for.
#pragma once

#include "kernels/nm_matmul/nm_matmul.h"

namespace twofour {

using DenseMatmul = NmMatmul;  // the same call; `weight` is dense

struct DenseMatmulKernel : RowBase {
  int64_t (*workspace_bytes)(const DenseMatmul&);
  void (*run)(const DenseMatmul&);
};

#define TWOFOUR_ROW(symbol, ...)                        \
  int64_t symbol##__workspace(const DenseMatmul& args); \
  void symbol(const DenseMatmul& args);
#include "dense_matmul.inc"
#undef TWOFOUR_ROW

// The layout "int4_dense" (int4/README.md): its size, a multiple of 64, and packing from rows of two int4 a byte, low
// first, in -8..7; scales and zeros (or null): out x ceil(in / group) floats.
int64_t int4_dense_layout__bytes(int64_t out, int64_t in, int64_t group, bool zeros);
void int4_dense_layout__pack(const uint8_t* values, const float* scales, const float* zeros, int64_t out, int64_t in,
                             int64_t group, void* packed);

}  // namespace twofour
