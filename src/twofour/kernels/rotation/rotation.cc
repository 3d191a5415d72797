// The row, once for every instruction set.
#include "rotation.h"

#include "native/simd.h"

namespace {

using twofour::Rotation;
using twofour::RotationFactor;

template <class F>
const F* factors(const RotationFactor& factor, int64_t batch, int64_t row) {
  return static_cast<const F*>(factor.data) + batch * factor.batch + row * factor.row;
}

// Both halves of a head are made of both halves of x. The first product is rounded before the second is added to it, so that a
// row's answer does not depend on what the compiler fuses.
template <class X, class F>
void turn(const Rotation& a, int64_t begin, int64_t end) {
  using V = Lanes;
  using reg = V::reg;
  const int64_t half = a.width / 2;
  for (int64_t at = begin; at < end; ++at) {
    const int64_t batch = at / a.length, row = at % a.length;
    const F *cos = factors<F>(a.cos, batch, row), *sin = factors<F>(a.sin, batch, row);
    const X* x = static_cast<const X*>(a.x) + batch * a.x_batch + row * a.x_row;
    X* y = static_cast<X*>(a.y) + at * a.heads * a.width;
    for (int64_t i = 0; i < half; i += V::width) {
      const int64_t left = half - i;
      const reg cos_low = V::load(cos + i, left), cos_high = V::load(cos + half + i, left);
      const reg sin_low = V::zero() - V::load(sin + i, left), sin_high = V::load(sin + half + i, left);
      for (int64_t head = 0; head < a.heads; ++head) {
        const int64_t low_at = head * a.width + i, high_at = low_at + half;
        const reg low = V::load(x + low_at, left), high = V::load(x + high_at, left);
        V::store(y + low_at, V::fma(high, sin_low, low * cos_low), left);
        V::store(y + high_at, V::fma(low, sin_high, high * cos_high), left);
      }
    }
  }
}

}  // namespace

namespace twofour {

void TWOFOUR_HERE(rotation)(const Rotation& a, int64_t begin, int64_t end) {
  if (a.bf16) a.low ? turn<uint16_t, uint16_t>(a, begin, end) : turn<uint16_t, float>(a, begin, end);
  else a.low ? turn<float, uint16_t>(a, begin, end) : turn<float, float>(a, begin, end);
}

}  // namespace twofour
