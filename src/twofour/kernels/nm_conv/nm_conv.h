// y = activation(conv(x, W) + bias + other) in fp32, channels last, W 2:4 along its input channels: the call, the table.
#pragma once

#include <cstdint>

#include "kernels/conv_activation.h"
#include "kernels/conv_axis.h"
#include "native/table.h"

namespace twofour {

// One call. x is (images, height, width, channels) with channels densest and no gaps; y and `other` (may be null) are
// (images, output height, output width, out channels). `weight` holds, per group of channels, what the layout "pairs"
// packed for (out_channels / groups) rows in the order of inputs of README.md, `weight_bytes` apart and 64-byte
// aligned. `bias` may be null. `workspace` is 64-byte aligned, of workspace_bytes(args) bytes, and may hold garbage.
// Whatever bytes `weight` holds, a kernel stays inside its operands; where an index says more than the layout can, it
// sets `damaged` and y is unspecified.
struct NmConv {
  const float* x;
  const char* weight;
  int64_t weight_bytes;
  const float* bias;
  const float* other;
  float* y;
  int64_t images, in_channels, out_channels, groups;
  ConvAxis height, width;
  ConvActivation activation;
  int threads;
  void* workspace;
  bool* damaged;
  // Groups of four inputs, by their numbers in the order of README.md, that the weight holds once more behind all inputs; without
  // groups of channels.
  const int32_t* twice = nullptr;
  int64_t twice_count = 0;
};

constexpr int64_t kConvBlock = 64;   // input channels that stand together in the order of inputs

// One row of the table. Every kernel is correct for any sizes with in_channels / groups a multiple of 4 and at most
// kConvTaps taps an axis. Both functions run the row's instructions: ask the CPU first.
struct NmConvKernel : RowBase {
  int64_t (*workspace_bytes)(const NmConv&);
  void (*run)(const NmConv&);
};

// A row whose weight is of two regions (layouts/regions.h).
struct HybridConvKernel : NmConvKernel {};

#define TWOFOUR_ROW(symbol, ...)                   \
  int64_t symbol##__workspace(const NmConv& args); \
  void symbol(const NmConv& args);
#include "nm_conv.inc"
#include "hybrid_conv.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
