// The order of the inputs of a weight that is looked up: groups of 6 channels of the taps of a window.
// Internal linkage: Python asks for it too.
#pragma once

#include <cstdint>

#include "native/integers.h"

namespace {

constexpr int64_t kBlockGroups = 100;  // of a row of taps that follow each other, so that their tables are in L1

// Groups of a pixel that stand together: blocks of a pixel's groups are alike.
inline int64_t lookup_block(int64_t taps, int64_t step) {
  const int64_t most = kBlockGroups / taps;
  return most < 1 ? 1 : ceil_div(step, ceil_div(step, most));
}

// Calls use(row, column, group of the pixel) in the order of the weight: neighbouring windows read the same tables of a block
// of groups in a row of taps, so a row passes before the next block.
template <class Use>
void lookup_order(int64_t rows, int64_t columns, int64_t step, const Use& use) {
  const int64_t block = lookup_block(columns, step);
  for (int64_t y = 0; y < rows; y++)
    for (int64_t begin = 0; begin < step; begin += block)
      for (int64_t x = 0; x < columns; x++)
        for (int64_t q = begin; q < begin + block && q < step; q++) use(y, x, q);
}

}  // namespace
