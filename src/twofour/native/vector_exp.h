// 2^x for vectors of simd.h. Internal linkage.
#pragma once

#include "compiler.h"

namespace {

// 2^r for |r| <= 1/2 by the polynomial of degree 5 with the least relative error that is 1 at 0 (9e-8).
template <class V>
TWOFOUR_INLINE typename V::reg exp2_of_fraction(typename V::reg r) {
  auto p = V::fma(r, V::all(1.3264709e-3f), V::all(9.6715111e-3f));
  p = V::fma(r, p, V::all(5.5507340e-2f));
  p = V::fma(r, p, V::all(2.4022242e-1f));
  p = V::fma(r, p, V::all(6.9314700e-1f));
  return V::fma(r, p, V::all(1.0f));
}

// 2^x for x <= 126, relative error below 2e-7; below -126 the answer is 0, and NaN stays NaN.
template <class V>
inline typename V::reg exp2_of(typename V::reg x) {
  const auto n = V::round(x);
  return V::scale_from(-126.0f, x, exp2_of_fraction<V>(x - n), n);
}

// The same with a relative error below 8e-5, for answers in bfloat16: the polynomial of degree 3 with the least one.
template <class V>
inline typename V::reg exp2_rough(typename V::reg x) {
  const auto n = V::round(x), r = x - n;
  auto p = V::fma(r, V::all(5.5171418e-2f), V::all(2.4261117e-1f));
  p = V::fma(r, p, V::all(6.9326106e-1f));
  p = V::fma(r, p, V::all(9.9992807e-1f));
  return V::scale_from(-126.0f, x, p, n);
}

}  // namespace
