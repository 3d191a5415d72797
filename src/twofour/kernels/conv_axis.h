// What one axis (height or width) of a convolution does: shared by sparse and dense ones.
#pragma once

#include <cstdint>

namespace twofour {

struct ConvAxis {
  int64_t input, output;                    // pixels
  int64_t taps, stride, padding, dilation;  // padding: zeros before the first pixel; behind the last as needed
};

constexpr int64_t kConvTaps = 64;  // most taps of one axis

}  // namespace twofour
