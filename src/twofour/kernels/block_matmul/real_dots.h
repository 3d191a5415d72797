// Dots of real numbers: how dwords of weights and inputs are multiplied, how a token becomes a row of dwords, and how
// sums leave. A Dots type has `V`, `Sum`, `per` (weights of a dword), `Token` (what is kept of each token), and these
// functions; whole_dots.h has those of whole numbers. Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/real_vectors.h"
#include "blocks.h"

namespace {

template <class Vector>
struct RealDots {
  using V = Vector;
  using Sum = typename V::reg;
  struct Token {};

  static TWOFOUR_INLINE Sum add(Sum a, Sum b) { return a + b; }

  // Sums [vector][tokens][V::width] of the rows of one unit -> the answers of `tokens` tokens from `first` on.
  static TWOFOUR_NOINLINE void finish(const Matmul& a, const Blocks& b, const Sum* sums, const Token*, int64_t first,
                                    int64_t tokens, int64_t unit) {
    const int64_t row = b.shape.row(unit), rows = b.shape.rows(unit);
    for (int64_t v = 0; v < kBlockUnit / V::width; v++) {
      const int64_t at = row + v * V::width, left = least(V::width, rows - v * V::width);
      if (left <= 0) break;
      const typename V::reg bias = bias_of<V>(a, at, left);
      for (int64_t t = 0; t < tokens; t++) store_outputs<V>(a, first + t, at, left, sums[v * tokens + t] + bias);
    }
  }
};

template <class Vector>
struct FloatDots : RealDots<Vector> {
  using V = Vector;
  static constexpr int per = 1;

  static TWOFOUR_INLINE typename V::reg dot(typename V::reg sum, typename V::reg x, typename V::reg w) {
    return V::fma(w, x, sum);
  }
  static TWOFOUR_INLINE void copy_token(const Matmul& a, int64_t token, char* to, typename RealDots<V>::Token*) {
    std::memcpy(to, x_of(a) + token * a.x_stride, static_cast<size_t>(a.in_features) * 4);
  }
};

// Pairs of bfloat16, multiplied as floats.
template <class Vector>
struct WidenedDots : RealDots<Vector> {
  using V = Vector;
  static constexpr int per = 2;

  static TWOFOUR_INLINE typename V::reg dot(typename V::reg sum, typename V::reg x, typename V::reg w) {
    sum = V::fma(V::lower((typename V::ireg)w), V::lower((typename V::ireg)x), sum);
    return V::fma(V::upper((typename V::ireg)w), V::upper((typename V::ireg)x), sum);
  }
  static TWOFOUR_INLINE void copy_token(const Matmul& a, int64_t token, char* to, typename RealDots<V>::Token*) {
    auto* half = reinterpret_cast<uint16_t*>(to);
    for (int64_t k = 0; k < a.in_features; k += V::width) {
      const int64_t left = a.in_features - k;
      const char* from = element(a.x, a.x_type, token * a.x_stride + k);
      V::store(half + k, load_numbers<V>(from, a.x_type, left), left);
    }
  }
};

}  // namespace
