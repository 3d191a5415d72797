// y = activation(x) of numbers in a row, dx = dy times its derivative at x, and y = activation(x) z of rows whose halves are x and z:
// float32 or bfloat16, computed in float32.
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
  int64_t begin, end;  // numbers; of gated rows, rows
  // Of gated rows: z of each, `width` numbers as x and the answer have; rows of x and z are `stride` apart, those of the answer
  // stand one behind the other. Null elsewhere.
  const void* gated = nullptr;
  int64_t width = 0, stride = 0;
};

using ActivationKernel = KernelRow<void(const ActivationCall&)>;

#define TWOFOUR_ROW(symbol, ...) void symbol(const ActivationCall&);
#include "activation.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
