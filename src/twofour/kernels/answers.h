// Sums of real numbers on their way out: bias, activation, second operand, type. Internal linkage.
//
// What is the same for all tokens is held by value: a store of bytes may be to anywhere, so that the call would be read again
// after each (of int8 products GELU into bytes took 21 cycles a vector on Zen 5 so, and 19 without).
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/epilogue_math.h"
#include "kernels/matmul.h"
#include "native/beside.h"
#include "native/compiler.h"
#include "native/integers.h"

namespace {

using twofour::Matmul;
using twofour::Type;

// How answers of a call leave; bytes of either sign are one type.
template <Activation kind, Type to, Rounding by>
struct Leaving {
  static constexpr Activation activation = kind;
  static constexpr Type type = to;
  static constexpr Rounding rounding = by;
};

// Calls use(Leaving) for an answer that is no bytes.
template <class Use>
inline void with_real_answers(const Matmul& a, const Use& use) {
  with_activation(a.epilogue.activation, [&](auto kind) {
    if (a.y_type == Type::f32) use(Leaving<kind.value, Type::f32, Rounding::float32>{});
    else use(Leaving<kind.value, Type::bf16, Rounding::bfloat16>{});
  });
}

// Tokens whose answers are finished side by side: those of a long formula wait for each other else, of short ones copies cost.
constexpr int tokens_beside(Activation kind) { return kind == Activation::none || kind == Activation::relu ? 1 : 4; }

// Calls each(token, constant count) for `tokens` tokens, so many at a time.
template <Activation kind, class Each>
TWOFOUR_INLINE void by_tokens(int64_t tokens, const Each& each) {
  constexpr int beside = tokens_beside(kind);
  int64_t t = 0;
  for (; t + beside <= tokens; t += beside) each(t, std::integral_constant<int, beside>{});
  for (; t < tokens; t++) each(t, std::integral_constant<int, 1>{});
}

// The answers of V::width rows from `row` on, those below `end`.
template <class V>
struct RealAnswers {
  const Type other_type;
  const Combine combine;
  const int64_t row, rows, y_stride, other_stride;
  void* const y;
  const void* const other;
  const typename V::reg bias;

  TWOFOUR_INLINE RealAnswers(const Matmul& a, int64_t first, int64_t end)
      : other_type(a.y_type == Type::bf16 ? Type::bf16 : Type::f32), combine(a.epilogue.combine), row(first),
        rows(least(end - first, V::width)), y_stride(a.y_stride), other_stride(a.epilogue.other_stride), y(a.y),
        other(a.epilogue.other), bias(a.bias == nullptr ? V::zero() : V::load(a.bias + first, rows)) {}

  TWOFOUR_INLINE typename V::reg combined(typename V::reg answer, int64_t token) const {
    if (combine == Combine::none) return answer;
    const int64_t at = token * other_stride + row;
    const auto with = other_type == Type::bf16 ? V::load(static_cast<const uint16_t*>(other) + at, rows)
                                               : V::load(static_cast<const float*>(other) + at, rows);
    return apply_combine<V>(answer, with, combine);
  }

  template <Type type>
  TWOFOUR_INLINE void store(typename V::reg answer, int64_t token) const {
    const int64_t at = token * y_stride + row;
    if constexpr (type == Type::f32) V::store(static_cast<float*>(y) + at, answer, rows);
    else V::store(static_cast<uint16_t*>(y) + at, answer, rows);
  }

  // Sums with their bias of N tokens from `token` on: calls put(answer, token) for each.
  template <class As, int N, class Put>
  TWOFOUR_INLINE void finish(const typename Beside<V, N>::reg& sums, int64_t token, const Put& put) const {
    const auto answers = activated<As::activation, Beside<V, N>, As::rounding>(sums);
    TWOFOUR_UNROLL
    for (int i = 0; i < N; i++) put(combined(answers.v[i], token + i), token + i);
  }
};

}  // namespace
