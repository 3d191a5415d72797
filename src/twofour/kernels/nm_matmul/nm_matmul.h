// y[tokens, out] = x[tokens, in] @ W^T + bias in fp32, W 2:4 sparse and packed: the call, and the table of kernels.
#pragma once

#include <cstdint>

namespace twofour {

// One call. Strides are in elements. `weight` is 64-byte aligned and holds the bytes that layout_pack wrote for the
// kernel's layout with the same out_features and in_features; `bias` may be null. `workspace` is 64-byte aligned, of
// workspace_bytes(args) bytes, and may hold garbage: it is all the scratch there is, so calls are re-entrant.
struct NmMatmul {
  const float* x;
  int64_t x_stride;
  const void* weight;
  const float* bias;
  float* y;
  int64_t y_stride;
  int64_t tokens, out_features, in_features;
  int threads;
  void* workspace;
};

// One row of the table. Every kernel is correct for any tokens >= 0, out_features >= 1, in_features a multiple of 4;
// tokens_min..tokens_max is where it is worth measuring. Both functions run the row's instructions: ask the CPU first.
struct NmMatmulKernel {
  const char* name;
  const char* isa;     // "scalar" | "avx2" | "avx512", the levels of native/isa.h
  const char* layout;  // "panels" | "pairs" | "rows", see layout.h
  int64_t tokens_min, tokens_max;
  int64_t (*workspace_bytes)(const NmMatmul&);
  void (*run)(const NmMatmul&);
};

#define TWOFOUR_NM_MATMUL_ROW(symbol, isa, layout, tokens_min, tokens_max) \
  int64_t symbol##__workspace(const NmMatmul& args);                       \
  void symbol(const NmMatmul& args);
#include "nm_matmul.inc"
#undef TWOFOUR_NM_MATMUL_ROW

extern const NmMatmulKernel kNmMatmulKernels[];
extern const int kNmMatmulKernelCount;

}  // namespace twofour
