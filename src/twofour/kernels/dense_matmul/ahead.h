// What dense products ask memory for: a panel's units, its blocks of tokens, ask for the panel that follows while they multiply,
// each for its part. Else a panel's first block alone would wait for memory, and the others leave it idle. Internal linkage.
#pragma once

#include <cstdint>

#include "kernels/dense_matmul/dense_matmul.h"
#include "native/compiler.h"
#include "native/integers.h"

namespace {

// Into L2, `each` bytes on for every row of 32 numbers that is multiplied.
struct Ahead {
  const char* from;
  int64_t each;

  // Of unit `index` of `units` of a panel of so many rows. Without a panel that follows it asks for what is read.
  static Ahead of(const float* read, const float* next, int64_t index, int64_t units, int64_t rows) {
    if (next == nullptr) return {reinterpret_cast<const char*>(read), 0};
    const int64_t each = ceil_div(4 * twofour::kDensePanel, units);
    return {reinterpret_cast<const char*>(next) + index * each * rows, each};
  }
  // The same of rows that are read so many times.
  Ahead spread(int64_t times) const { return {from, ceil_div(each, times)}; }
  TWOFOUR_INLINE void fetch() {
    __builtin_prefetch(from, 0, 2);
    if (each > 64) __builtin_prefetch(from + 64, 0, 2);
    from += each;
  }
};

}  // namespace
