// y = x * gate(E activation(R mean(x) + r) + e) for each channel of an image, fp32, channels last: the call, the table.
#pragma once

#include <cstdint>

#include "kernels/epilogue.h"
#include "native/integers.h"
#include "native/table.h"

namespace twofour {

enum class Gate : int { sigmoid, hardsigmoid };  // the order is that of cpu.py

constexpr int64_t kSqueezeBlock = 64;  // pixels that are summed on their own, so that no sum has many terms

// One call. x and y are (images, pixels, channels), contiguous, and may be one memory; `reduce` and `expand` (squeezed,
// channels), the second one's rows an input each; a bias may be null.
struct SqueezeExcite {
  const float *x, *reduce, *reduce_bias, *expand, *expand_bias;
  float* y;
  int64_t images, pixels, channels, squeezed;
  Activation activation;
  Gate gate;
  int threads;
  float* workspace;  // `floats` of them

  int64_t blocks() const { return ceil_div(pixels, kSqueezeBlock); }
  // Of an image: sums of each block, which the means and later the scales take the place of, then the squeezed means.
  int64_t each() const { return blocks() * channels + squeezed; }
  int64_t floats() const { return images * each(); }
};

// One row of the table: all images, by a team of its own.
struct SqueezeExciteKernel : RowBase {
  void (*run)(const SqueezeExcite&);
};

#define TWOFOUR_ROW(symbol, ...) void symbol(const SqueezeExcite& args);
#include "squeeze_excite.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
