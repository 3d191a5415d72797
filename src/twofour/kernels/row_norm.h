// A normalisation of rows as a call: of its own, or behind the product whose rows they are.
#pragma once

#include <cstdint>

#include "native/table.h"

namespace twofour {

// One call. x is (rows, width) of the kernel's type, `x_stride` elements from row to row; y is contiguous, float32 or
// bfloat16 (`y_bf16`), and may be x where they are of one type. `weight` and `bias` are (width) or null. `centred`:
// subtract the mean (LayerNorm), else divide by the root mean square alone.
struct Norm {
  const void* x;
  int64_t x_stride;
  const float *weight, *bias;
  void* y;
  bool y_bf16;
  int64_t rows, width;
  float eps;
  bool centred;
  // The answer as bytes besides, by a range: round(y / bytes_scale) + bytes_zero within 0 ... 255, of y before it is rounded
  // to bfloat16; a NaN is 0. Null for none; y may be null where these are given.
  uint8_t* bytes = nullptr;
  float bytes_scale = 1.0f;
  int32_t bytes_zero = 0;
};

// One row of the table: `run` computes rows [begin, end).
using NormKernel = KernelRow<void(const Norm&, int64_t begin, int64_t end)>;

const NormKernel& norm_kernel(int index);  // a row of the family by its index (norm/bind.cc)

}  // namespace twofour
