// Derivatives of activations, for gradients that go backwards through them. Included once per instruction set; internal
// linkage. tests/kernels/test_nm_gradient.py holds them against float64.
#pragma once

#include <cstdint>

#include "kernels/epilogue_math.h"
#include "kernels/precise_math.h"

namespace {

// dL/dz of dL/dy and z. Absolute error of the derivative 3e-7 (relu: none); beyond where float32 knows no tail it is 0
// or 1. NaN gets through, but in dL/dy where relu is flat, as torch has it.
template <twofour::Activation kind, class V>
TWOFOUR_INLINE typename V::reg through(typename V::reg dy, typename V::reg z) {
  using Math = FloatMath<V>;
  using F = typename V::reg;
  using twofour::Activation;
  if constexpr (kind == Activation::relu) return z <= 0.0f ? V::zero() : dy;
  if constexpr (kind == Activation::gelu) {  // Phi(z) + z phi(z)
    const F x = Math::at_least(-13.0f, Math::at_most(13.0f, z));
    const F phi = Math::exp_of(x * x * -0.5f) * 0.3989422804014327f;
    return dy * ((PreciseMath<V>::erf(x * 0.7071067811865476f) * 0.5f + 0.5f) + x * phi);
  }
  // y = z s(u), s(u) = 1 / (1 + e^-u): s + z s (1 - s) u', and 1 - s = e^-u s. Clamped so that e^-u is finite.
  if constexpr (kind == Activation::gelu_tanh || kind == Activation::silu) {
    constexpr bool silu = kind == Activation::silu;
    const F x = Math::at_least(silu ? -87.0f : -10.0f, Math::at_most(silu ? 87.0f : 10.0f, z)), square = x * x;
    const F u = silu ? x : x * (square * 0.07135481627159599f + 1.5957691216057308f);
    const F slope = square * 0.21406444881478797f + 1.5957691216057308f;
    const F e = Math::template exp_of<true>(u), s = 1.0f / (e + 1.0f);
    const F bend = x * (e * s);
    return dy * (s * ((silu ? bend : bend * slope) + 1.0f));
  }
  return dy;
}

// The same of `count` numbers in a row.
template <twofour::Activation kind, class V, class T>
TWOFOUR_INLINE void through_activation(const T* dy, const T* z, T* dz, int64_t count) {
  int64_t i = 0;
  for (; i + V::width <= count; i += V::width)
    V::store_unaligned(dz + i, through<kind, V>(V::load_unaligned(dy + i), V::load_unaligned(z + i)));
  if (const int64_t left = count - i)
    V::store_partial(dz + i, through<kind, V>(V::load_partial(dy + i, left), V::load_partial(z + i, left)), left);
}

}  // namespace
