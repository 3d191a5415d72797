// The choice of nm_unbiased/README.md, one group of four in each lane of V (native/simd.h). Included once per
// instruction set; internal linkage.
//
// No product feeds a sum here, so that no compiler fuses them: every instruction set makes the same choices.
#pragma once

#include <cstdint>

#include "native/compiler.h"

namespace {

// 24 bits from a counter: the finaliser of MurmurHash3.
template <class V>
TWOFOUR_INLINE typename V::U hashed(uint32_t first, uint32_t seed) {
  typename V::U x = (V::lanes() + first) * 0x9e3779b1u + seed;
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return (x ^ x >> 16) >> 8;
}
// Uniform in [0, 1).
template <class V>
TWOFOUR_INLINE typename V::F uniform(uint32_t first, uint32_t seed) {
  return __builtin_convertvector((typename V::I)hashed<V>(first, seed), typename V::F) * 0x1p-24f;
}

template <class V>
TWOFOUR_INLINE typename V::F magnitude(typename V::F x) {
  return (typename V::F)((typename V::I)x & 0x7fffffff);
}
template <class V>
TWOFOUR_INLINE typename V::F smaller(typename V::F a, typename V::F b) {
  return a < b ? a : b;
}

template <class V>
struct Chosen {
  typename V::I first, second;   // positions, ascending
  typename V::F values[2];
};

// What stands for x where its group keeps x: the expectation is x.
template <class V>
TWOFOUR_INLINE typename V::F scaled(typename V::F x, typename V::F least) {
  const typename V::F a = magnitude<V>(x), larger = a > least ? a : least;
  const typename V::I sign = (typename V::I)x & static_cast<int32_t>(0x80000000u);
  const typename V::F value = (typename V::F)((typename V::I)larger | sign);
  return a == 0.0f ? typename V::F{} : value;
}

template <class V>
TWOFOUR_INLINE Chosen<V> choose(const typename V::F (&x)[4], typename V::F u) {
  using F = typename V::F;
  using I = typename V::I;
  const F a = magnitude<V>(x[0]), b = magnitude<V>(x[1]), c = magnitude<V>(x[2]), d = magnitude<V>(x[3]);
  const F ab = a + b, cd = c + d, sum = ab + cd;
  const F rest = smaller<V>(smaller<V>(b + cd, a + cd), smaller<V>(ab + d, ab + c));  // without the largest
  F half = smaller<V>(sum * 0.5f, rest);
  half = sum == sum ? half : sum;  // a NaN stays one
  const F tiny = F{} + 0x1p-126f, cap = half > tiny ? half : tiny;
  const F c0 = smaller<V>(a, cap), c1 = c0 + smaller<V>(b, cap), c2 = c1 + smaller<V>(c, cap);
  const F at = u * half;
  I first = -((c0 <= at) + (c1 <= at) + (c2 <= at));
  I second = -((c0 - half <= at) + (c1 - half <= at) + (c2 - half <= at));
  first = first > 2 ? I{} + 2 : first;
  second = second > first ? second : first + 1;
  const F one = first == 0 ? x[0] : first == 1 ? x[1] : x[2];
  const F two = second == 1 ? x[1] : second == 2 ? x[2] : x[3];
  return {first, second, {scaled<V>(one, half), scaled<V>(two, half)}};
}

// Floats rounded to bfloat16, in the lower halves of dwords.
template <class V>
TWOFOUR_INLINE typename V::U as_bf16(typename V::F x) {
  return (typename V::U)V::to_upper(x) >> 16;
}

}  // namespace
