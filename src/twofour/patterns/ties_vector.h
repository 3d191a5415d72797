// Ties of 2:4 by smallest and largest of the lanes of an instruction set (`MagnitudeLanes`). Internal linkage.
#pragma once

#include "magnitudes.h"

namespace twofour {
namespace {

// Byte shuffles within 16 bytes that swap neighbouring values, and neighbouring pairs of values.
struct Swaps {
  uint8_t neighbours[16] = {}, pairs[16] = {};
  constexpr explicit Swaps(int width) {
    for (int byte = 0; byte < 16; ++byte) {
      neighbours[byte] = static_cast<uint8_t>(byte ^ width);
      pairs[byte] = static_cast<uint8_t>(byte ^ (2 * width));
    }
  }
};

// Groups side by side: lane i of the four vectors is a group.
template <class Lanes>
inline int64_t ties_across(const typename Lanes::Value* first, const NmTies& a) {
  using Vector = typename Lanes::Vector;
  int64_t ties = 0, i = 0;
  for (; i + Lanes::kCount <= a.inner; i += Lanes::kCount) {
    const Vector w = Lanes::load(first + i, a.sign), x = Lanes::load(first + a.inner + i, a.sign);
    const Vector y = Lanes::load(first + 2 * a.inner + i, a.sign), z = Lanes::load(first + 3 * a.inner + i, a.sign);
    const Vector low = Lanes::larger(Lanes::smaller(w, x), Lanes::smaller(y, z));
    const Vector high = Lanes::smaller(Lanes::larger(w, x), Lanes::larger(y, z));
    ties += Lanes::equal_and_set(low, high);
  }
  for (; i < a.inner; ++i) ties += tied_four(first + i, a.inner, a.sign);
  return ties;
}

// Groups of four lanes: each lane holds its group's answer, so four times too many are counted.
template <class Lanes>
inline int64_t ties_along(const typename Lanes::Value* values, int64_t count, Sign sign) {
  using Vector = typename Lanes::Vector;
  int64_t lanes = 0, ties = 0, i = 0;
  for (; i + Lanes::kCount <= count; i += Lanes::kCount) {
    const Vector x = Lanes::load(values + i, sign), y = Lanes::swap_neighbours(x);
    const Vector small = Lanes::smaller(x, y), large = Lanes::larger(x, y);
    const Vector low = Lanes::larger(small, Lanes::swap_pairs(small));
    const Vector high = Lanes::smaller(large, Lanes::swap_pairs(large));
    lanes += Lanes::equal_and_set(low, high);
  }
  for (; i < count; i += 4) ties += tied_four(values + i, 1, sign);
  return ties + lanes / 4;
}

template <class Lanes>
int64_t run(const NmTies& a) {
  const auto* values = static_cast<const typename Lanes::Value*>(a.values);
  if (a.inner == 1) return ties_along<Lanes>(values, a.outer * a.length, a.sign);
  int64_t ties = 0;
  for (int64_t g = 0; g < a.outer * (a.length / 4); ++g) ties += ties_across<Lanes>(values + 4 * g * a.inner, a);
  return ties;
}

}  // namespace
}  // namespace twofour
