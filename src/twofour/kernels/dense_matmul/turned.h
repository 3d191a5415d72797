// Tokens turned into blocks: inputs one below the other, tokens side by side. Internal linkage.
#pragma once

#include <cstdint>

#include "native/compiler.h"
#include "native/integers.h"

namespace {

// Rows of `inputs` numbers, `stride` apart, at most V::width of them -> to[input], each input's `tokens` apart.
template <class V>
inline void turn_rows(const float* from, int64_t stride, int64_t rows, int64_t inputs, float* to, int64_t tokens) {
  for (int64_t i = 0; i < inputs; i += V::width) {
    const int64_t columns = least(V::width, inputs - i);
    typename V::reg square[V::width];
    TWOFOUR_UNROLL
    for (int r = 0; r < V::width; r++) square[r] = r < rows ? V::load(from + r * stride + i, columns) : V::zero();
    V::transpose(square);
    TWOFOUR_UNROLL
    for (int c = 0; c < V::width; c++)
      if (c < columns) V::store(to + (i + c) * tokens, square[c], rows);
  }
}

}  // namespace
