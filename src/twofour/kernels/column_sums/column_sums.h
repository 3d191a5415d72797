// Sums over the rows of a matrix, float32 or bfloat16, in float32, or means.
#pragma once

#include <cstdint>

#include "native/table.h"

namespace twofour {

struct ColumnSums {
  const void* from;  // (rows, columns), `stride` numbers from row to row
  bool bf16;
  int64_t rows, stride;
  float over;          // what the sums are divided by
  float* sums;         // (columns)
  int64_t begin, end;  // columns
};

using ColumnSumsKernel = KernelRow<void(const ColumnSums&)>;

#define TWOFOUR_ROW(symbol, ...) void symbol(const ColumnSums&);
#include "column_sums.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
