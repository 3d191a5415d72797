// Keep-masks of N:M patterns: the N largest scores of every M consecutive ones, the lowest index winning ties.
#pragma once

#include <cstdint>

#include "native/table.h"

namespace twofour {

constexpr int kNmMaskMaxGroup = 64;  // a kernel ranks a group on the stack

struct NmMask {
  const float* scores;  // groups * m values, the reduction axis contiguous
  uint8_t* keep;        // same shape, 1 = kept
  int64_t groups;
  int n, m;
  bool absolute;  // rank by |score|
};

// Returns false when a score is NaN or infinite; `keep` is then unspecified.
using NmMaskKernel = KernelRow<bool(const NmMask&)>;

#define TWOFOUR_ROW(symbol, ...) bool symbol(const NmMask&);
#include "nm_mask.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
