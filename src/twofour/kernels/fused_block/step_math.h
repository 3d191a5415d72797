// What steps of a fused block compute where that is no single function of vectors. Internal linkage.
#pragma once

#include "fused_block.h"
#include "kernels/precise_math.h"

namespace {

template <class V>
inline typename V::reg power(typename V::reg a, typename V::reg b) {
  typename V::reg y = a;
  for (int i = 0; i < V::width; i++) y[i] = __builtin_powf(a[i], b[i]);
  return y;
}

// Calls use(first, of) with what a reduction begins with and how it takes up a number.
template <class V, class Use>
TWOFOUR_INLINE void reduction(twofour::StepOp op, const Use& use) {
  using M = PreciseMath<V>;
  using F = typename V::reg;
  using twofour::StepOp;
  switch (op) {
    case StepOp::amax: return use(-M::kInfinity, [](F a, F b) { return M::maximum(a, b); });
    case StepOp::amin: return use(M::kInfinity, [](F a, F b) { return M::minimum(a, b); });
    case StepOp::prod: return use(1.0f, [](F a, F b) { return a * b; });
    default: return use(0.0f, [](F a, F b) { return a + b; });
  }
}

}  // namespace
