// Magnitudes as unsigned numbers, and the tie of one group of four. Internal linkage.
#pragma once

#include "nm_ties.h"

namespace twofour {
namespace {

template <class Value>
inline Value magnitude(Value value, Sign sign) {
  constexpr auto kTop = static_cast<Value>(Value{1} << (8 * sizeof(Value) - 1));
  if (sign == Sign::kBit) return static_cast<Value>(value & static_cast<Value>(~kTop));
  return sign == Sign::kComplement && value & kTop ? static_cast<Value>(~value + 1) : value;
}

// The middle two of four are the larger of the pairs' smaller ones and the smaller of their larger ones.
template <class Value>
inline bool tied_four(const Value* at, int64_t step, Sign sign) {
  const Value a = magnitude(at[0], sign), b = magnitude(at[step], sign);
  const Value c = magnitude(at[2 * step], sign), d = magnitude(at[3 * step], sign);
  const Value low1 = a < b ? a : b, high1 = a < b ? b : a, low2 = c < d ? c : d, high2 = c < d ? d : c;
  const Value low = low1 > low2 ? low1 : low2, high = high1 < high2 ? high1 : high2;
  return low == high && low != 0;
}

}  // namespace
}  // namespace twofour
