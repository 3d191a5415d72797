// A gradient pruned 2:4 along its channels, dense or packed as the left operand of a product that sums over them.
#pragma once

#include <cstdint>

#include "kernels/epilogue.h"
#include "native/table.h"

namespace twofour {

// Where the gradient comes from: dL/dz = dL/dy times the derivative of y = activation(z), made before it is pruned. All
// of the gradient's type, contiguous.
struct ActivationGradient {
  Activation activation;  // none: the gradient is there already
  const void* upstream;   // dL/dy
  const void* at;         // z; of relu, y serves as well
  void* gradient;         // dL/dz, which is written
};

enum class GradientMode : int { magnitude, rescaled, random, unbiased };

// The gradient is (samples, tokens, columns), columns % 4 == 0; a row is one token's columns. Result: packed, a "panels"
// (float32) or "bf16_panels" layout of (samples * tokens, columns) behind its header; else contiguous rows of the
// gradient's own type. Work is cut into tasks (tasks.h).
struct NmGradient {
  const void* gradient;
  bool bf16;
  int64_t stride;  // numbers from row to row
  int64_t samples, tokens, columns;
  GradientMode mode;
  float eps;      // of rescaled
  uint32_t seed;  // of random and unbiased
  void* out;      // null: nothing is pruned
  bool packed;
  int threads;
  int64_t begin, end;  // tasks
  ActivationGradient from;
};

using NmGradientKernel = KernelRow<void(const NmGradient&)>;

#define TWOFOUR_ROW(symbol, ...) void symbol(const NmGradient&);
#include "nm_gradient.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
