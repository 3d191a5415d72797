// y = activation(conv(x, W) + bias + other) in fp32, channels last, W dense: the call, the table.
#pragma once

#include <cstdint>

#include "kernels/conv_activation.h"
#include "kernels/conv_axis.h"
#include "native/table.h"

namespace twofour {

// One call. x is (images, height, width, in_channels) with channels densest and no gaps, or of few channels as `plane` says;
// y and `other` (may be null) are
// (images, output height, output width, out_channels). `weight` is 64-byte aligned: for each group ceil(its outputs /
// kConvPanel) panels, each (what the row reads one after the other, kConvPanel). `bias` may be null. `workspace` is 64-byte
// aligned, of workspace_bytes(args) bytes, and may hold garbage. Rows of the layouts winograd2 and winograd4 take one group,
// 3 x 3 taps of stride 1 and dilation 1, and no activation but a ReLU.
struct DenseConv {
  const float *x, *weight, *bias, *other;
  float* y;
  int64_t images, in_channels, out_channels, groups;
  ConvAxis height, width;
  ConvActivation activation;
  int threads;
  void* workspace;
  int64_t plane = 0;  // not 0: x is (images, in_channels, height, width), its channels so many floats apart
};

constexpr int64_t kFewChannels = 16;  // below which direct rows read lines of the image, a line for each channel

// Whether direct rows take an image whose channels stand apart.
inline bool takes_planes(int64_t in_channels, int64_t groups, const ConvAxis& height, const ConvAxis& width) {
  return groups == 1 && in_channels < kFewChannels && height.dilation == 1 && width.dilation == 1;
}

constexpr int64_t kConvPanel = 32;  // output channels that stand together in a weight

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
