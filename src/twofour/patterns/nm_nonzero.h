// Which values of a weight are not zero, one bit each: what a check of patterns needs of it.
#pragma once

#include <cstdint>

#include "native/table.h"

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

// A row's dtype is "8 bits", "16 bits" and so on: the size of a value.
using NmNonzeroKernel = KernelRow<NmNonzeroCounts(const NmNonzero&)>;

#define TWOFOUR_ROW(symbol, ...) NmNonzeroCounts symbol(const NmNonzero&);
#include "nm_nonzero.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
