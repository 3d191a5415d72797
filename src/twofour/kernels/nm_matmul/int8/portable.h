// Octets in 128-bit vectors as GCC and clang write them: the portable row, and what rows with a dot product of bytes in
// such vectors share with it.
#pragma once

#include "row_octets.h"

namespace {

struct Portable : WholeLanes {
  struct Octet {
    const int8_t* values;
    ints meta;
  };
  static Octet octet(const uint8_t* p, ints meta) { return {reinterpret_cast<const int8_t*>(p), meta}; }
  static const uint8_t* broadcast8(const uint8_t* p) { return p; }
  // Called, not inlined: unrolled into every caller this file took a minute and 560 MB to compile.
  TWOFOUR_NOINLINE static ints dot(ints sum, const uint8_t* x, const Octet& w) {
    for (int r = 0; r < width; r++) {
      const int8_t* v = w.values + r * 4;
      const uint32_t m = w.meta[r];
      sum[r] += static_cast<uint32_t>(v[0] * x[m & 3] + v[1] * x[m >> 8 & 3] + v[2] * x[4 + (m >> 16 & 3)] +
                                      v[3] * x[4 + (m >> 24 & 3)]);
    }
    return sum;
  }
};

}  // namespace
