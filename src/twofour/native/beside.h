// Vectors beside each other: what is computed of them goes step by step through all, so that none waits for the one before.
//
// A long polynomial is one chain of operations. The next vector's does not depend on it, but a core looks only so far ahead:
// GELU of one vector after the other took 15 cycles each on Zen 5, of four side by side 9. `Beside<V, N>` offers what a
// formula of simd.h's vectors needs, for N of them. Internal linkage, for kernel sources only.
#pragma once

#include "compiler.h"

namespace {

template <class V, int N>
struct Beside {
  struct reg {
    typename V::reg v[N];
  };

  template <class Use>
  static TWOFOUR_INLINE reg each(const Use& use) {
    reg made;
    TWOFOUR_UNROLL
    for (int i = 0; i < N; i++) made.v[i] = use(i);
    return made;
  }
  static TWOFOUR_INLINE reg zero() { return all(0.0f); }
  static TWOFOUR_INLINE reg all(float one) {
    return each([&](int) TWOFOUR_INLINED { return V::all(one); });
  }
  static TWOFOUR_INLINE reg min(const reg& a, const reg& b) {
    return each([&](int i) TWOFOUR_INLINED { return V::min(a.v[i], b.v[i]); });
  }
  static TWOFOUR_INLINE reg max(const reg& a, const reg& b) {
    return each([&](int i) TWOFOUR_INLINED { return V::max(a.v[i], b.v[i]); });
  }
  static TWOFOUR_INLINE reg magnitude(const reg& a) {
    return each([&](int i) TWOFOUR_INLINED { return V::magnitude(a.v[i]); });
  }
  static TWOFOUR_INLINE reg round(const reg& a) {
    return each([&](int i) TWOFOUR_INLINED { return V::round(a.v[i]); });
  }
  static TWOFOUR_INLINE reg scale(const reg& a, const reg& n) {
    return each([&](int i) TWOFOUR_INLINED { return V::scale(a.v[i], n.v[i]); });
  }
  static TWOFOUR_INLINE reg fma(const reg& a, const reg& b, const reg& c) {
    return each([&](int i) TWOFOUR_INLINED { return V::fma(a.v[i], b.v[i], c.v[i]); });
  }
};

#define TWOFOUR_BESIDE(op)                                                                                     \
  template <class R, int N = sizeof(R::v) / sizeof(R::v[0])>                                                   \
  TWOFOUR_INLINE R operator op(R a, const R& b) {                                                              \
    TWOFOUR_UNROLL                                                                                             \
    for (int i = 0; i < N; i++) a.v[i] = a.v[i] op b.v[i];                                                     \
    return a;                                                                                                  \
  }                                                                                                            \
  template <class R, int N = sizeof(R::v) / sizeof(R::v[0])>                                                   \
  TWOFOUR_INLINE R operator op(R a, float b) {                                                                 \
    TWOFOUR_UNROLL                                                                                             \
    for (int i = 0; i < N; i++) a.v[i] = a.v[i] op b;                                                          \
    return a;                                                                                                  \
  }
TWOFOUR_BESIDE(+)
TWOFOUR_BESIDE(-)
TWOFOUR_BESIDE(*)
TWOFOUR_BESIDE(/)
#undef TWOFOUR_BESIDE

}  // namespace
