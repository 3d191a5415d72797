// An unbiased 2:4 estimate of a gradient along its tokens, packed as the left operand of the weight gradient.
#pragma once

#include <cstdint>

#include "native/table.h"

namespace twofour {

// Rows [begin, end) of the estimate S (rows x tokens) of gradient^T, written behind the header of a panel layout of
// kernels/layouts: "panels" (float32) or "bf16_panels". begin is a multiple of kPanelRows.
struct NmUnbiased {
  const void* gradient;  // tokens x rows, `stride` numbers from token to token
  bool bf16;             // type of the gradient
  int64_t stride, tokens, rows;  // tokens % 4 == 0
  uint32_t seed;
  bool to_bf16;          // layout "bf16_panels", values rounded to nearest; else "panels"
  void* packed;
  int64_t begin, end;
};

using NmUnbiasedKernel = KernelRow<void(const NmUnbiased&)>;

#define TWOFOUR_ROW(symbol, ...) void symbol(const NmUnbiased&);
#include "nm_unbiased.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
