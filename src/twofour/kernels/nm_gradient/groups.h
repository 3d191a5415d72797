// What is kept of one group of four in each lane: the four modes on vectors. x[i] holds value i of every group. Included
// once per instruction set; internal linkage.
#pragma once

#include <cstdint>

#include "kernels/unbiased_choice.h"
#include "native/compiler.h"
#include "nm_gradient.h"

namespace {

using twofour::GradientMode;

// Whether two of three are negative.
template <class I>
TWOFOUR_INLINE I majority(I a, I b, I c) {
  return (a & b) | (c & (a | b));
}

// The two largest magnitudes, the lowest index first among equals, NaN above all: the bits of |x| order as x does.
// `values` are what is written for x.
template <class V>
TWOFOUR_INLINE Chosen<V> largest_two(const typename V::F (&x)[4], const typename V::F (&values)[4]) {
  using I = typename V::I;
  const I a = (I)magnitude<V>(x[0]), b = (I)magnitude<V>(x[1]), c = (I)magnitude<V>(x[2]), d = (I)magnitude<V>(x[3]);
  // Negative where the left one loses; there is no overflow between numbers of 31 bits.
  const I ab = a - b, ac = a - c, ad = a - d, bc = b - c, bd = b - d, cd = c - d;
  const I a_goes = majority(ab, ac, ad), b_stays = majority(ab, ~bc, ~bd);
  const I c_stays = majority(ac, bc, ~cd), d_stays = majority(ad, bd, cd);
  const I zero{};
  return {a_goes < 0 ? (b_stays < 0 ? zero + 1 : zero + 2) : zero,
          d_stays < 0 ? zero + 3 : (c_stays < 0 ? zero + 2 : zero + 1),
          {a_goes < 0 ? (b_stays < 0 ? values[1] : values[2]) : values[0],
           d_stays < 0 ? values[3] : (c_stays < 0 ? values[2] : values[1])}};
}

// One of the six pairs, by 24 random bits.
template <class V>
TWOFOUR_INLINE Chosen<V> any_two(const typename V::F (&x)[4], typename V::U bits) {
  using I = typename V::I;
  const I pair = (I)(bits * 6u >> 24);
  const I first = pair < 3 ? I{} : pair < 5 ? I{} + 1 : I{} + 2;
  const I second = pair < 3 ? pair + 1 : pair < 5 ? pair - 1 : I{} + 3;
  return {first, second,
          {first == 0 ? x[0] : first == 1 ? x[1] : x[2], second == 1 ? x[1] : second == 2 ? x[2] : x[3]}};
}

// Groups [group, group + width) of the gradient; `factor` multiplies what stays, where the mode rescales.
template <class V, GradientMode mode>
TWOFOUR_INLINE Chosen<V> keep_two(const typename V::F (&x)[4], uint32_t group, uint32_t seed, const float* factor) {
  if constexpr (mode == GradientMode::unbiased) return choose<V>(x, uniform<V>(group, seed));
  else if constexpr (mode == GradientMode::random) return any_two<V>(x, hashed<V>(group, seed));
  else if constexpr (mode == GradientMode::magnitude) return largest_two<V>(x, x);
  typename V::F values[4];
  TWOFOUR_UNROLL
  for (int i = 0; i < 4; i++) values[i] = x[i] * V::load_unaligned(factor + i * V::width);
  return largest_two<V>(x, values);
}

// The groups again, zero where nothing stays.
template <class V>
TWOFOUR_INLINE void spread(const Chosen<V>& kept, typename V::F (&y)[4]) {
  const typename V::F zero{};
  TWOFOUR_UNROLL
  for (int i = 0; i < 4; i++) y[i] = kept.first == i ? kept.values[0] : kept.second == i ? kept.values[1] : zero;
}

}  // namespace
