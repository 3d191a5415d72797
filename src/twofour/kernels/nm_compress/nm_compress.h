// Dense fp32 rows -> canonical 2:4: kept values in order and one nibble of indices per group (docs/formats.md).
#pragma once

#include <cstdint>

#include "native/table.h"

namespace twofour {

struct NmCompress {
  const float* weight;   // rows x columns, `stride` elements from row to row; columns % 4 == 0
  int64_t stride, rows, columns;
  float* values;         // rows x columns / 2
  uint8_t* indices;      // rows x ceil(columns / 8); low nibble first; nibble = first index | second index << 2
  int threads;
};

// Keeps the two largest magnitudes of every group (lowest index wins ties) and returns how many non-zero values were
// dropped: 0 means the weight was 2:4 already. NaN counts as the largest magnitude and is kept as it is.
using NmCompressKernel = KernelRow<int64_t(const NmCompress&)>;

#define TWOFOUR_ROW(symbol, ...) int64_t symbol(const NmCompress&);
#include "nm_compress.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
