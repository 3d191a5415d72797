// y = activation(conv(x, W) + bias) in fp32, channels last, a filter of its own for each channel: the call, the table.
#pragma once

#include <cstdint>

#include "kernels/conv_activation.h"
#include "kernels/conv_axis.h"
#include "native/table.h"

namespace twofour {

// One call. x is (images, height, width, channels) with
// channels densest and no gaps, y likewise; `weight` is (taps of the height, taps of the width, channels), contiguous;
// `bias` may be null.
struct Depthwise {
  const float* x;
  const float* weight;
  const float* bias;
  float* y;
  int64_t images, channels;
  ConvAxis height, width;
  ConvActivation activation;
};

// One row of the table: rows [begin, end) of outputs, counted over all images. Any sizes.
struct DepthwiseConvKernel : RowBase {
  void (*run)(const Depthwise&, int64_t begin, int64_t end);
};

#define TWOFOUR_ROW(symbol, ...) void symbol(const Depthwise& args, int64_t begin, int64_t end);
#include "depthwise_conv.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
