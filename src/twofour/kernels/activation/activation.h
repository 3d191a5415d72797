// y = activation(x) of numbers in a row, and dx = dy times its derivative at x: float32 or bfloat16, computed in float32.
#pragma once

#include <cstdint>

#include "kernels/epilogue.h"
#include "native/table.h"

namespace twofour {

// One call. All are of one type and without gaps; `answer` may be `x` or `upstream`.
struct ActivationCall {
  Activation activation;  // but none
  const void* x;          // of the gradient of relu, y serves as well
  const void* upstream;   // dy; null: y is wanted, else dx
  void* answer;
  bool bf16;
  int64_t begin, end;  // numbers
};

using ActivationKernel = KernelRow<void(const ActivationCall&)>;

#define TWOFOUR_ROW(symbol, ...) void symbol(const ActivationCall&);
#include "activation.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
