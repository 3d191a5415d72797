// y = x cos + (the second half of x negated, then the first) sin, of heads that stand side by side in rows: rotary positions.
#pragma once

#include <cstdint>

#include "native/table.h"

namespace twofour {

// Factors of one row for all of its heads: float32, or bfloat16 with `low`. Strides are in numbers, 0 of what repeats.
struct RotationFactor {
  const void* data;
  int64_t batch, row;
};

// x (batch, length, heads * width), y the same without gaps; both float32 or bfloat16. `width` is even.
struct Rotation {
  const void* x;
  void* y;
  bool bf16, low;
  int64_t x_batch, x_row;
  RotationFactor cos, sin;  // (batch, length, width)
  int64_t length, heads, width;
};

// Rows [begin, end) of all of batch * length.
using RotationKernel = KernelRow<void(const Rotation&, int64_t begin, int64_t end)>;

#define TWOFOUR_ROW(symbol, ...) void symbol(const Rotation&, int64_t begin, int64_t end);
#include "rotation.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
