// An axis of an image in the order that the windows of a convolution meet its pixels. Internal linkage, for kernel sources only.
#pragma once

#include <cstdint>

#include "conv_axis.h"

namespace {

using twofour::ConvAxis;
using twofour::kConvTaps;

// One axis of the packed input of `count` output positions. The input pixels that a tap meets are `stride` apart, so
// pixels of one remainder (phase) modulo the stride stand together; what no tap meets is not stored.
struct PackedAxis {
  int64_t stride, slots = 0, positions = 0;
  int64_t phase[kConvTaps], start[kConvTaps];
  int64_t tap[kConvTaps];  // where the pixel that tap k meets at output position 0 stands

  PackedAxis(const ConvAxis& axis, int64_t count) : stride(axis.stride) {
    for (int64_t k = 0; k < axis.taps; k++) {
      const int64_t first = k * axis.dilation % stride;
      int64_t known = 0;
      while (known < slots && phase[known] != first) known++;
      if (known < slots) continue;
      int64_t reach = 0;
      for (int64_t other = k; other < axis.taps; other++)
        if (other * axis.dilation % stride == first) reach = other * axis.dilation / stride;
      for (int64_t other = k; other < axis.taps; other++)
        if (other * axis.dilation % stride == first) tap[other] = positions + other * axis.dilation / stride;
      phase[slots] = first, start[slots++] = positions;
      positions += count + reach;
    }
  }
  int64_t pixel(int64_t position) const {
    int64_t slot = slots - 1;
    while (start[slot] > position) slot--;
    return (position - start[slot]) * stride + phase[slot];
  }
};

}  // namespace
