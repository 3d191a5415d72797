// A convolution as a product whose tokens are windows over images: what one pixel of the answer reads.
#pragma once

#include <cstdint>

#include "conv_axis.h"
#include "matmul.h"

namespace twofour {

// x of the product is (images, height, width, channels) without gaps; its tokens are the pixels of the answer, (images, output
// height, output width), and their inputs stand tap by tap, the channels of a tap together. Beside an image everything is zero.
struct Windows {
  int64_t images, channels;
  ConvAxis height, width;
  Type added = Type::f32;  // or bf16: of a second operand, whatever the answer is
  float most = __builtin_inff();  // of a ReLU

  int64_t inputs() const { return height.taps * width.taps * channels; }
};

// One call. x is float32, bfloat16 or, of a static range, bytes; a dynamic range is an image's. A second operand is added
// before the activation, which is none, ReLU or ReLU6 then.
struct WindowConv {
  Matmul product;
  Windows windows;
};

}  // namespace twofour
