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

}  // namespace
