// A multiply-add rounded once, the same bits in every instruction set but once in some 2^29 times, as the function says.
// Included once per set; everything has internal linkage.
#pragma once

#include "native/compiler.h"

namespace {

// w x + sum, rounded once. Where no instruction does that, the product is exact in doubles; their sum is rounded to a double
// first, which is another float once in some 2^29 times. fmaf would be a call for each number, in software on such a CPU.
template <class V>
TWOFOUR_INLINE typename V::reg rounded_once(typename V::reg w, typename V::reg x, typename V::reg sum) {
#if defined(TWOFOUR_SET_avx2) || defined(TWOFOUR_SET_neon)
  return V::fma(w, x, sum);
#else
  for (int i = 0; i < V::width; i++) sum[i] = static_cast<float>(static_cast<double>(w[i]) * x[i] + sum[i]);
  return sum;
#endif
}

}  // namespace
