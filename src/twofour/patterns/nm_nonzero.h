// Which values of a weight are not zero, one bit each: what a check of patterns needs of it.
#pragma once

#include <cstdint>

namespace twofour {

struct NmNonzero {
  const void* values;  // `count` of the row's width, in memory order
  uint8_t* bits;       // (count + 7) / 8 bytes; bit i % 8 of byte i / 8 is value i, bits past the end are 0
  int64_t count;
  int64_t magnitude;  // the bits of a value that say it is not zero: all but the sign of a float
  int64_t finite;     // the largest magnitude of a finite value, as a signed number of the row's width
};

struct NmNonzeroCounts {
  int64_t nonzero, negative, broken;  // values that are not zero, that are -0.0, that are NaN or infinite
};

struct NmNonzeroKernel {
  const char* name;
  const char* isa;
  int width;  // bytes of a value
  NmNonzeroCounts (*run)(const NmNonzero&);
};

#define TWOFOUR_NM_NONZERO(symbol, isa, width) NmNonzeroCounts symbol(const NmNonzero&);
#include "nm_nonzero.inc"
#undef TWOFOUR_NM_NONZERO

}  // namespace twofour
