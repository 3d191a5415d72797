// Ties of an N:M pattern: groups where not the magnitudes but the positions decide which value stays.
#pragma once

#include <cstdint>

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
struct NmTiesKernel {
  const char* name;
  const char* isa;
  int width;  // bytes of a value
  int n, m;   // 0, 0 = any
  int64_t (*run)(const NmTies&);
};

#define TWOFOUR_NM_TIES(symbol, isa, width, n, m) int64_t symbol(const NmTies&);
#include "nm_ties.inc"
#undef TWOFOUR_NM_TIES

}  // namespace twofour
