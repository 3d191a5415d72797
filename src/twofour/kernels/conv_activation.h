// What a convolution does to a sum before it stores it: an activation of products, or a ReLU with a bound (ReLU6).
#pragma once

#include "epilogue.h"

namespace twofour {

constexpr float kUnbounded = __builtin_inff();

struct ConvActivation {
  Activation kind = Activation::none;
  float most = kUnbounded;  // of a ReLU

  // A ReLU is done while sums stand in registers, and others in a pass behind that.
  bool relu() const { return kind == Activation::relu; }
  bool passes() const { return kind != Activation::none && !relu(); }
};

}  // namespace twofour
