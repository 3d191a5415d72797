// y = (x - mean) / sqrt(variance + eps) * weight + bias of each row in float32, or without the mean (RMSNorm); x and y
// float32 or bfloat16: the call, and its kernels.
#pragma once

#include "kernels/row_norm.h"

namespace twofour {

#define TWOFOUR_ROW(symbol, ...) void symbol(const Norm& args, int64_t begin, int64_t end);
#include "norm.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
