// Ties of an N:M pattern: groups where not the magnitudes but the positions decide which value stays.
#pragma once

#include <cstdint>

#include "native/table.h"

namespace twofour {

constexpr int kNmTiesMaxGroup = 64;

enum class Sign : int { kBit, kComplement, kNone };  // of floats, of whole numbers, of unsigned ones

struct NmTies {
  const void* values;  // of the row's width, as they lie in memory: (outer, length, inner), groups along `length`
  Sign sign;
  int64_t outer, length, inner;
  int n, m;
};

// Counts the groups whose n-th and (n + 1)-th largest magnitudes are equal and not zero.
using NmTiesKernel = KernelRow<int64_t(const NmTies&)>;

#define TWOFOUR_ROW(symbol, ...) int64_t symbol(const NmTies&);
#include "nm_ties.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
