// The transforms of one axis, by the points that the polynomials are evaluated at (README.md).
#pragma once

#include <cstdint>

#include "native/compiler.h"

namespace {

// Four outputs from six inputs: points 0, a, -a, b, -b and infinity.
template <class V>
struct Points4 {
  using reg = typename V::reg;
  static constexpr int outputs = 4, inputs = 6;
  static constexpr float a = 0.625f, b = 1.5f, aa = a * a, bb = b * b;  // all exact, as are the constants below

  static TWOFOUR_INLINE void input(const reg (&d)[6], reg (&t)[6]) {
    const reg e = V::fma(V::all(-bb), d[2], d[4]), o = V::fma(V::all(-bb), d[1], d[3]);
    const reg f = V::fma(V::all(-aa), d[2], d[4]), p = V::fma(V::all(-aa), d[1], d[3]);
    t[0] = V::fma(V::all(aa * bb), d[0], V::fma(V::all(-aa - bb), d[2], d[4]));
    t[1] = V::fma(V::all(a), o, e);
    t[2] = V::fma(V::all(-a), o, e);
    t[3] = V::fma(V::all(b), p, f);
    t[4] = V::fma(V::all(-b), p, f);
    t[5] = V::fma(V::all(aa * bb), d[1], V::fma(V::all(-aa - bb), d[3], d[5]));
  }
  static TWOFOUR_INLINE void output(const reg (&m)[6], reg (&y)[4]) {
    const reg s = m[1] + m[2], d = m[1] - m[2], u = m[3] + m[4], e = m[3] - m[4];
    y[0] = m[0] + s + u;
    y[1] = V::fma(V::all(a), d, V::all(b) * e);
    y[2] = V::fma(V::all(aa), s, V::all(bb) * u);
    y[3] = V::fma(V::all(aa * a), d, V::fma(V::all(bb * b), e, m[5]));
  }
};

// Two outputs from four inputs: points 0, 1, -1 and infinity.
template <class V>
struct Points2 {
  using reg = typename V::reg;
  static constexpr int outputs = 2, inputs = 4;

  static TWOFOUR_INLINE void input(const reg (&d)[4], reg (&t)[4]) {
    t[0] = d[0] - d[2];
    t[1] = d[1] + d[2];
    t[2] = d[2] - d[1];
    t[3] = d[3] - d[1];
  }
  static TWOFOUR_INLINE void output(const reg (&m)[4], reg (&y)[2]) {
    y[0] = m[0] + m[1] + m[2];
    y[1] = m[1] - m[2] + m[3];
  }
};

}  // namespace
