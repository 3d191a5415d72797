// Dropout of attention: which weights go follows from a seed and their place, so that the backward pass needs no mask. Internal
// linkage.
#pragma once

#include <cstdint>

#include "cells.h"

namespace {

// 32 random bits of a counter: the finaliser of MurmurHash3.
template <class U>
TWOFOUR_INLINE U random_bits(U counter, uint32_t seed) {
  U x = counter * 0x9e3779b1u + seed;
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

// The seed of one row of weights.
inline uint32_t row_seed(const Attention& a, int64_t batch, int64_t head, int64_t row) {
  const auto at = static_cast<uint64_t>((batch * a.heads + head) * a.queries + row);
  return random_bits(static_cast<uint32_t>(at), random_bits(static_cast<uint32_t>(at >> 32), a.drop_seed));
}

// Clears the weights of one row that go, and multiplies the others by `factor`; keys 2i and 2i + 1 share the bits of number i,
// the lower half is the first one's. Cells of two numbers are only cleared. The row has room for whole vectors.
template <class C>
TWOFOUR_NOINLINE void drop(const Attention& a, int64_t batch, int64_t head, int64_t row, int64_t seen, float factor, float* cells) {
  using V = typename C::V;
  using U = typename V::U;
  const uint32_t seed = row_seed(a, batch, head, row), below = a.drop_below;
  for (int64_t cell = 0; cell < ceil_div(seen, C::step); cell += V::width) {
    const auto numbers = V::load_unaligned(cells + cell);
    const U place = V::lanes() + static_cast<uint32_t>(cell);
    if constexpr (C::step == 2) {
      const U bits = random_bits<U>(place, seed);
      const U low = (bits & 0xffffu) >= below ? U{} + 0xffffu : U{}, high = bits >> 16 >= below ? U{} + 0xffff0000u : U{};
      V::store_unaligned(cells + cell, (typename V::reg)((U)numbers & (low | high)));
    } else {
      const U bits = random_bits<U>(place >> 1, seed) >> ((place & 1u) << 4) & 0xffffu;
      V::store_unaligned(cells + cell, (typename V::reg)((U)(numbers * V::all(factor)) & (bits >= below ? ~U{} : U{})));
    }
  }
}

}  // namespace
