// e^x for a vector type of vector_*.h. Internal linkage: for instruction-set objects only.
#pragma once

namespace {

// e^x for x <= 0 or small, relative error below 2e-7; below -87 the answer is 0 and NaN stays NaN.
// x = (n + r) ln 2 with |r| <= 1/2; 2^r by its Taylor series, whose seventh term is below 1e-8.
template <class V>
inline typename V::reg exp_of(typename V::reg x) {
  const auto bounded = V::max(V::all(-87.0f), x);  // maxps answers its second operand where one is NaN
  const auto n = V::round(V::mul(bounded, V::all(1.44269504f)));
  // log2(e) in two parts, so that large |x| keep their digits.
  const auto r = V::fma(bounded, V::all(1.92596299e-8f), V::fma(bounded, V::all(1.44269502f), V::sub(V::zero(), n)));
  auto p = V::fma(r, V::all(1.5403530e-4f), V::all(1.3333558e-3f));
  p = V::fma(r, p, V::all(9.6181291e-3f));
  p = V::fma(r, p, V::all(5.5504109e-2f));
  p = V::fma(r, p, V::all(2.4022651e-1f));
  p = V::fma(r, p, V::all(6.9314718e-1f));
  p = V::fma(r, p, V::all(1.0f));
  return V::where_at_least(x, -87.0f, V::scale(p, n));
}

}  // namespace
