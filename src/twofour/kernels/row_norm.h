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
};

// One row of the table: `run` computes rows [begin, end).
using NormKernel = KernelRow<void(const Norm&, int64_t begin, int64_t end)>;

const NormKernel& norm_kernel(int index);  // a row of the family by its index (norm/bind.cc)

}  // namespace twofour
