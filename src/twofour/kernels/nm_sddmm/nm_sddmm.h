// The product of two dense matrices at the kept places of a 2:4 one: the weight gradient where the weight is masked.
#pragma once

#include <cstdint>

#include "native/table.h"

namespace twofour {

// values (out x in / 2) = (left^T right) at the places that canonical indices name: all of them, whatever they held.
struct NmSddmm {
  const void *left, *right;  // tokens x out, tokens x in, in % 4 == 0
  bool bf16;                 // type of both
  int64_t left_stride, right_stride;
  int64_t tokens, out, in;
  const uint8_t* indices;  // out x ceil(in / 8)
  float* values;
  int64_t block;  // tokens at once, a multiple of 32: 16 inputs of so many should stay in the first cache
  int64_t step;   // lanes of 4 bytes from column to column of a transposed block, a multiple of 16
  void* scratch;  // of `nm_sddmm_bytes`, on a 64-byte boundary
  int threads;
};

// Both sides of a block of tokens, transposed.
inline int64_t nm_sddmm_bytes(int64_t out, int64_t in, int64_t step) {
  return ((out + 15) / 16 + (in + 15) / 16) * 16 * step * 4;
}

using NmSddmmKernel = KernelRow<void(const NmSddmm&)>;

#define TWOFOUR_ROW(symbol, ...) void symbol(const NmSddmm&);
#include "nm_sddmm.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
