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
  uintptr_t from;  // a number: what is asked for may lie behind the panel's end
  int64_t each;

  // Of unit `index` of `units` of a panel of so many rows; nothing where no panel follows.
  static Ahead of(const float* next, int64_t index, int64_t units, int64_t rows) {
    if (next == nullptr) return {0, 0};
    const int64_t each = ceil_div(4 * twofour::kDensePanel, units);
    return {reinterpret_cast<uintptr_t>(next) + static_cast<uintptr_t>(index * each * rows), each};
  }
  // The same of rows that are read so many times.
  Ahead spread(int64_t times) const { return {from, ceil_div(each, times)}; }
  TWOFOUR_INLINE void fetch() {
    if (each == 0) return;
    __builtin_prefetch(reinterpret_cast<const void*>(from), 0, 2);
    if (each > 64) __builtin_prefetch(reinterpret_cast<const void*>(from + 64), 0, 2);
    from += static_cast<uintptr_t>(each);
  }
};

}  // namespace
