// y = relu(conv(x, W) + bias + other) in fp32, channels last, W dense with 3 x 3 taps of stride 1: the call, the table.
#pragma once

#include <cstdint>

#include "native/table.h"

namespace twofour {

// One call. x is (images, height, width, in_channels) with channels densest and no gaps; y and `other` (may be null) are
// (images, out_height, out_width, out_channels). Above and left of an image stand `top` rows and `left` columns of zeros,
// below and right of it as many as the output asks for. `weight` is 64-byte aligned: ceil(out_channels / kConvPanel) panels,
// each (places of a transformed tile, in_channels, kConvPanel). `bias` may be null. `workspace` is 64-byte aligned, of
// workspace_bytes(args) bytes, and may hold garbage.
struct DenseConv {
  const float *x, *weight, *bias, *other;
  float* y;
  int64_t images, in_channels, out_channels, height, width, out_height, out_width, top, left;
  bool relu;
  int threads;
  void* workspace;
};

constexpr int64_t kConvPanel = 32;  // output channels that stand together in a transformed weight

// One row of the table. Both functions run the row's instructions: ask the CPU first.
struct DenseConvKernel : RowBase {
  int64_t (*workspace_bytes)(const DenseConv&);
  void (*run)(const DenseConv&);
};

#define TWOFOUR_ROW(symbol, ...)                      \
  int64_t symbol##__workspace(const DenseConv& args); \
  void symbol(const DenseConv& args);
#include "dense_conv.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
