// Activations and epilogues of float vectors, for every kernel. V: native/simd.h.
//
// The polynomials are minimax fits made for this file (linear programming on Chebyshev points, coefficients rounded to
// float). tests/kernels/test_epilogue.py holds them against float64.
#pragma once

#include <cstdint>

#include "kernels/epilogue.h"
#include "native/compiler.h"
#include "native/vector_exp.h"

namespace {

using twofour::Activation;
using twofour::Combine;
using twofour::Epilogue;

template <class V>
struct FloatMath {
  using F = typename V::reg;

  // A NaN in x stays: max and min return their second operand then.
  static TWOFOUR_INLINE F at_least(float low, F x) { return V::max(V::all(low), x); }
  static TWOFOUR_INLINE F at_most(float high, F x) { return V::min(V::all(high), x); }

  // 1 + x c[0] + x^2 c[1] + ...
  template <int n>
  static TWOFOUR_INLINE F polynomial(const float (&c)[n], F x, float first) {
    F p = V::all(c[n - 1]);
    TWOFOUR_UNROLL
    for (int i = n - 2; i >= 0; i--) p = p * x + c[i];
    return p * x + first;
  }

  // p of any size, but no infinity: relative error 2e-7 of normal numbers; infinite from 128 on, without AVX-512 from 127.5
  // on, where the power of two that it multiplies by is; what is no normal number is one with AVX-512, and else 0.
  static TWOFOUR_INLINE F exp2_of(F p) {
    const F n = V::round(p);
    return V::scale(exp2_of_fraction<V>(p - n), n);
  }

  // e^x, or e^-x. Relative error 2e-7 + 2e-8 |x| where that is a normal number; e^-87.3 below, infinite above 88.7
  // (above 88.37 without AVX-512).
  template <bool minus = false>
  static TWOFOUR_INLINE F exp_of(F x) {
    constexpr float log2_e = minus ? -1.44269502162933f : 1.44269502162933f;
    x = minus ? at_least(-88.8f, at_most(87.3f, x)) : at_most(88.8f, at_least(-87.3f, x));
    const F n = V::round(x * log2_e);
    return V::scale(exp2_of_fraction<V>(x * log2_e - n), n);  // the difference is exact where it is fused
  }

  // x / (1 + e^-z): of -inf NaN, as torch's.
  static TWOFOUR_INLINE F gated(F x, F z) { return x / (exp_of<true>(z) + 1.0f); }
  static TWOFOUR_INLINE F silu(F x) { return gated(x, x); }
  // x / 2 (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
  static TWOFOUR_INLINE F gelu_tanh(F x) { return gated(x, x * (x * x * 0.07135481627159599f + 1.5957691216057308f)); }

  // max(x, 0) - tail; of -inf NaN, as torch's, which computes -inf * 0.
  static TWOFOUR_INLINE F without_tail(F x, F tail) {
    const F below = at_most(0.0f, x);
    return at_least(0.0f, x) - (tail + (below - below));
  }
  // max(x, 0) - t Q(t), t = |x|, Q(t) = erfc(t / sqrt(2)) / 2: no cancellation below zero, no division. log2 Q is
  // smooth: a polynomial of degree 10 on [0, 6], which falls on beyond 6.
  static TWOFOUR_INLINE F gelu(F x) {
    constexpr float c[] = {-1.151110053062439f,      -0.4591684937477112f,     -0.05259747430682182f,
                           0.007169845048338175f,    -0.0001756110868882388f,  -0.00019801421149168164f,
                           5.3533098252955824e-05f,  -7.154673767217901e-06f,  5.134631919645471e-07f,
                           -1.571677898937196e-08f};
    const F t = at_most(16.0f, V::magnitude(x));
    const F q = exp2_of(polynomial(c, t, -1.0f));
    return without_tail(x, t * q);
  }
  // The same with a relative error below 5e-4 for answers of 8 bits: bfloat16 is rounded to 4e-3.
  static TWOFOUR_INLINE F gelu_rough(F x) {
    constexpr float c[] = {-1.146335014257181f, -0.4708950984983069f, -0.04357461632882549f, 0.004593911192995696f,
                           -0.00020946404944545543f};
    constexpr float e[] = {0.69326106f, 0.24261117f, 0.055171418f};
    const F t = at_most(16.0f, V::magnitude(x));
    const F p = polynomial(c, t, -1.0f), n = V::round(p);
    const F q = V::scale(polynomial(e, p - n, 0.99992807f), n);
    return without_tail(x, t * q);
  }
  // x Phi(x) with Phi as a polynomial of |x| <= 4, for answers in bytes: off by at most 2e-4 up to x = 4 and by 3.3e-4 x above,
  // which is an eighth of a step of kGeluStep or more.
  static TWOFOUR_INLINE F gelu_of_bytes(F x) {
    constexpr float c[] = {-0.06457316875457764f,   0.008772415108978748f,   -0.0008140210411511362f,
                           4.795608401764184e-05f, -1.5986299786163727e-06f, 2.278196120641951e-08f};
    const F above = at_least(-4.0f, x), within = at_most(4.0f, above);
    return above * (within * polynomial(c, within * within, 0.3978833854198456f) + 0.5f);
  }
  static TWOFOUR_INLINE F relu(F x) { return at_least(0.0f, x); }
};

constexpr float kGeluStep = 1.6e-3f;

// What an activation's answer is rounded to. It may be off by an eighth of that rounding before.
enum class Rounding { float32, bfloat16, bytes };

// Of bytes by a scale: below kGeluStep it takes what bfloat16 takes.
TWOFOUR_INLINE Rounding rounding_of_bytes(Activation kind, float scale) {
  return kind != Activation::gelu || scale >= kGeluStep ? Rounding::bytes : Rounding::bfloat16;
}

// Relative error about 1e-6 in float32 (gelu: down to x = -4, 4e-6 down to -6). NaN and +inf stay; of -inf relu is 0 and
// the others are NaN, but gelu on its way to bytes is 0.
template <Activation kind, class V, Rounding rounding = Rounding::float32>
TWOFOUR_INLINE typename V::reg activated(typename V::reg x) {
  if constexpr (kind == Activation::relu) return FloatMath<V>::relu(x);
  if constexpr (kind == Activation::gelu && rounding == Rounding::bytes) return FloatMath<V>::gelu_of_bytes(x);
  if constexpr (kind == Activation::gelu && rounding == Rounding::bfloat16) return FloatMath<V>::gelu_rough(x);
  if constexpr (kind == Activation::gelu) return FloatMath<V>::gelu(x);
  if constexpr (kind == Activation::gelu_tanh) return FloatMath<V>::gelu_tanh(x);
  if constexpr (kind == Activation::silu) return FloatMath<V>::silu(x);
  return x;
}

// Calls use(constant) with an object whose value is the activation: one branch for a whole loop.
template <Activation kind>
struct ActivationConstant {
  static constexpr Activation value = kind;
};
template <class Use>
TWOFOUR_INLINE void with_activation(Activation kind, const Use& use) {
  switch (kind) {
    case Activation::none: return use(ActivationConstant<Activation::none>{});
    case Activation::relu: return use(ActivationConstant<Activation::relu>{});
    case Activation::gelu: return use(ActivationConstant<Activation::gelu>{});
    case Activation::gelu_tanh: return use(ActivationConstant<Activation::gelu_tanh>{});
    case Activation::silu: return use(ActivationConstant<Activation::silu>{});
  }
}
// The same with the branch at every vector, for where loops cannot be arranged around it.
template <class V>
TWOFOUR_INLINE typename V::reg apply_activation(typename V::reg x, Activation kind) {
  with_activation(kind, [&](auto constant) { x = activated<decltype(constant)::value, V>(x); });
  return x;
}

template <class V>
TWOFOUR_INLINE typename V::reg apply_combine(typename V::reg x, typename V::reg other, Combine combine) {
  return combine == Combine::add ? x + other : x * other;
}

// y[row][column] (sums with their bias) -> epilogue, in place, right after they were stored and while they are in the
// caches: rows [row, row + rows) and columns [column, column + columns) of the whole output, float32 as `other` is.
template <class V>
TWOFOUR_NOINLINE void finish_rows(const Epilogue& epilogue, float* y, int64_t stride, int64_t row, int64_t rows,
                                  int64_t column, int64_t columns) {
  const Combine combine = epilogue.combine;
  with_activation(epilogue.activation, [&](auto constant) {
    for (int64_t r = row; r < row + rows; r++) {
      float* to = y + r * stride + column;
      const float* other = static_cast<const float*>(epilogue.other) + r * epilogue.other_stride + column;
      for (int64_t c = 0; c < columns; c += V::width) {
        const int64_t left = columns - c;
        auto v = V::load(to + c, left);
        v = activated<decltype(constant)::value, V>(v);
        if (combine != Combine::none) v = apply_combine<V>(v, V::load(other + c, left), combine);
        V::store(to + c, v, left);
      }
    }
  });
}

}  // namespace
