// dL/dx of a convolution whose dL/dz is 2:4 along its channels: the call, the table.
#pragma once

#include <cstdint>

#include "kernels/conv_axis.h"
#include "native/table.h"

namespace twofour {

// dx[n, i, j, c] = sum over taps (h, w) and kept outputs o of gradient[n, y, x, o] * weight[o, c, h, w], where the window of
// (y, x) has the pixel (i, j) under that tap. `gradient` holds what the layout "panels" packed of (images * output pixels,
// out_channels); `dx` is (images, height, width, in_channels), channels densest, no gaps. The weight's strides are in
// numbers. `workspace` is 64-byte aligned, of workspace_bytes(args) bytes, and may hold garbage.
struct NmConvGradient {
  const char* gradient;
  const float* weight;
  int64_t out_stride, in_stride, height_stride, width_stride;
  float* dx;
  int64_t images, in_channels, out_channels;
  ConvAxis height, width;
  int threads;
  void* workspace;
};

// Both functions run the row's instructions: ask the CPU first.
struct NmConvGradientKernel : RowBase {
  int64_t (*workspace_bytes)(const NmConvGradient&);
  void (*run)(const NmConvGradient&);
};

#define TWOFOUR_ROW(symbol, ...)                           \
  int64_t symbol##__workspace(const NmConvGradient& args); \
  void symbol(const NmConvGradient& args);
#include "nm_conv_gradient.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
