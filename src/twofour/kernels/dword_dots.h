// What products of dwords share: a dword is one float, two bfloat16 or four bytes of a weight's row, beside as many inputs of a
// token. A Dots type says how both are multiplied, how a token becomes a row of dwords, and how sums leave: `V`, `Sum`,
// `per` (weights of a dword), `Token` (what is kept of each token), `add`, `dot`, `copy_token` and `finish`.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/byte_dots.h"
#include "kernels/real_vectors.h"
#include "kernels/whole_outputs.h"
#include "native/simd.h"

namespace {

template <class Vector>
struct RealDots {
  using V = Vector;
  using Sum = typename V::reg;
  struct Token {};

  static TWOFOUR_INLINE Sum add(Sum a, Sum b) { return a + b; }

  // Sums [vector][tokens][V::width] of the rows [row, end) -> the answers of `tokens` tokens from `first` on.
  static void finish(const Matmul& a, const WholeRows&, const Sum* sums, int64_t vectors, const Token*, int64_t first,
                     int64_t tokens, int64_t row, int64_t end) {
    with_real_answers(a, [&](auto as) { finish_as<decltype(as)>(a, sums, vectors, first, tokens, row, end); });
  }
  template <class As>
  static TWOFOUR_NOINLINE void finish_as(const Matmul& a, const Sum* sums, int64_t vectors, int64_t first, int64_t tokens,
                                         int64_t row, int64_t end) {
    for (int64_t v = 0; v < vectors && row + v * V::width < end; v++, sums += tokens) {
      const RealAnswers<V> answers(a, row + v * V::width, end);
      by_tokens<As::activation>(tokens, [&](int64_t t, auto count) TWOFOUR_INLINED {
        const auto with_bias =
            Beside<V, count.value>::each([&](int i) TWOFOUR_INLINED { return sums[t + i] + answers.bias; });
        answers.template finish<As, count.value>(with_bias, first + t, [&](Sum answer, int64_t token) TWOFOUR_INLINED {
          answers.template store<As::type>(answer, token);
        });
      });
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

// Pairs of bfloat16: by vdpbf16ps, which adds both products with round to nearest and takes denormals for zero, else as
// floats.
template <class Vector>
struct PairDots : RealDots<Vector> {
  using V = Vector;
  static constexpr int per = 2;

  static TWOFOUR_INLINE typename V::reg dot(typename V::reg sum, typename V::reg x, typename V::reg w) {
#if defined(TWOFOUR_SET_avx512_bf16)
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
#else
    sum = V::fma(V::lower((typename V::ireg)w), V::lower((typename V::ireg)x), sum);
    return V::fma(V::upper((typename V::ireg)w), V::upper((typename V::ireg)x), sum);
#endif
  }
  static TWOFOUR_INLINE void copy_token(const Matmul& a, int64_t token, char* to, typename RealDots<V>::Token*) {
    auto* half = reinterpret_cast<uint16_t*>(to);
    if (a.x_type == Type::bf16) {
      std::memcpy(to, element(a.x, a.x_type, token * a.x_stride), static_cast<size_t>(a.in_features) * 2);
      return;
    }
    for (int64_t k = 0; k < a.in_features; k += V::width) {
      const int64_t left = a.in_features - k;
      const char* from = element(a.x, a.x_type, token * a.x_stride + k);
      V::store(half + k, load_numbers<V>(from, a.x_type, left), left);
    }
  }
};

// Four bytes of inputs, unsigned, by four of weights.
struct ByteDots {
  using V = WholeLanes;
  using Sum = V::ints;
  using Token = Range;
  static constexpr int per = 4;

  static TWOFOUR_INLINE Sum add(Sum a, Sum b) { return V::add(a, b); }
  static TWOFOUR_INLINE Sum dot(Sum sum, V::reg x, V::reg w) {
    return dot_bytes<V, false>(sum, (Sum)x, (Sum)w);
  }
  static TWOFOUR_INLINE void copy_token(const Matmul& a, int64_t token, char* to, Token* kept) {
    *kept = ::copy_token<V>(a, token, reinterpret_cast<uint8_t*>(to), 8);
  }
  // Sums as RealDots::finish has them; `kept` is of the token `first`.
  static TWOFOUR_INLINE void finish(const Matmul& a, const WholeRows& weight, const Sum* sums, int64_t vectors,
                                    const Token* kept, int64_t first, int64_t tokens, int64_t row, int64_t end) {
    finish_sums<V>(a, weight, reinterpret_cast<const int32_t*>(sums), vectors, tokens, kept - first, first, tokens, row, end);
  }
};

}  // namespace
