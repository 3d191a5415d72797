// From exact sums to the answer: zero point off, scales and bias in fp32, the epilogue, then fp32, bf16, u8 or s8.
// Included once per instruction-set file, with V the vector type of that file; everything has internal linkage.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/answers.h"
#include "kernels/matmul.h"
#include "native/compiler.h"
#include "kernels/whole_inputs.h"

namespace {

// Of each row of the weight its scale and its sum, by which the zero point of the activations is taken off. Whole vectors
// can be read from every row on.
struct WholeRows {
  const float* scales;
  const int32_t* sums;
};

// The number itself, rounded: the compiler does not fuse what made it with what follows.
template <class R>
TWOFOUR_INLINE R apart(R value) {
#if defined(__x86_64__)
  asm("" : "+v"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#endif
  return value;
}

// Answers that may be bytes.
template <class V>
struct Answers : RealAnswers<V> {
  const Rounder<V> rounder;

  TWOFOUR_INLINE Answers(const Matmul& a, int64_t first, int64_t end)
      : RealAnswers<V>(a, first, end), rounder(1.0f / a.quantization.y_scale, a.quantization.y_zero, low(a), low(a) + 255) {}
  static int low(const Matmul& a) { return a.y_type == Type::u8 ? 0 : -128; }

  // Products, scaled, of N tokens from `token` on; the bias is added.
  template <class As, int N>
  TWOFOUR_INLINE void leave(const typename V::reg (&scaled)[N], int64_t token) const {
    const auto sums = Beside<V, N>::each([&](int i) TWOFOUR_INLINED { return apart(scaled[i]) + this->bias; });
    this->template finish<As, N>(sums, token, [&](typename V::reg answer, int64_t t) TWOFOUR_INLINED {
      if constexpr (As::type != Type::u8) this->template store<As::type>(answer, t);
      else V::store_bytes(static_cast<uint8_t*>(this->y) + t * this->y_stride + this->row, rounder(answer), this->rows);
    });
  }
};

// Calls use(Leaving).
template <class Use>
inline void with_answers(const Matmul& a, const Use& use) {
  if (a.y_type == Type::f32 || a.y_type == Type::bf16) return with_real_answers(a, use);
  with_activation(a.epilogue.activation, [&](auto kind) {
    if (rounding_of_bytes(kind.value, a.quantization.y_scale) == Rounding::bytes)
      return use(Leaving<kind.value, Type::u8, Rounding::bytes>{});
    if constexpr (kind.value == Activation::gelu) use(Leaving<kind.value, Type::u8, Rounding::bfloat16>{});
  });
}

// Sums on their way out: with the scales and sums of the rows. `Static`: one range for all tokens, so that what it makes of
// the scales and sums does not change.
template <class V, bool Static>
struct Finish : Answers<V> {
  typename V::reg scale;
  typename V::ints sums;

  // `range` is that of any token.
  TWOFOUR_INLINE Finish(const Matmul& call, const WholeRows& weight, const Range& range, int64_t first, int64_t end)
      : Answers<V>(call, first, end), scale(V::load_unaligned(weight.scales + first)),
        sums((typename V::ints)V::load_unaligned(reinterpret_cast<const float*>(weight.sums) + first)) {
    if (Static) {
      scale = V::all(range.scale) * scale;
      sums = V::minus_product(typename V::ints{}, sums, range.zero);
    }
  }

  // (sum - zero * sums) * (x scale * w scale), each operation rounded once.
  TWOFOUR_INLINE typename V::reg product(typename V::ints sum, const Range& range) const {
    if constexpr (Static) return V::to_real(V::add(sum, sums)) * scale;
    return V::to_real(V::minus_product(sum, sums, range.zero)) * (V::all(range.scale) * scale);
  }
};

// What a vector of stored sums of token `t` of the call stands for: those themselves.
template <class V>
struct StoredSums {
  TWOFOUR_INLINE typename V::ints operator()(const int32_t* from, int64_t /*t*/) const {
    return V::load_ints(reinterpret_cast<const uint8_t*>(from));
  }
};

// Sums of `vectors` times V::width rows from `row` on, those below `end`, [vector][stride tokens][V::width], to the answers
// of `tokens` tokens from `first` on. `ranges` are those of the whole call; `read` says what a stored sum stands for.
template <class V, class As, bool Static, class Sums = StoredSums<V>>
TWOFOUR_NOINLINE void finish_as(const Matmul& a, const WholeRows& weight, const int32_t* sums, int64_t vectors,
                                int64_t stride, const Range* ranges, int64_t first, int64_t tokens, int64_t row,
                                int64_t end, const Sums& read = {}) {
  for (int64_t v = 0; v < vectors && row + v * V::width < end; v++) {
    const Finish<V, Static> finish(a, weight, ranges[first], row + v * V::width, end);
    by_tokens<As::activation>(tokens, [&](int64_t t, auto count) TWOFOUR_INLINED {
      typename V::reg scaled[count.value];
      TWOFOUR_UNROLL
      for (int i = 0; i < count.value; i++) {
        const int32_t* from = sums + (v * stride + t + i) * V::width;
        scaled[i] = finish.product(read(from, first + t + i), ranges[first + t + i]);
      }
      finish.template leave<As>(scaled, first + t);
    });
  }
}

template <class V, class Sums = StoredSums<V>>
inline void finish_sums(const Matmul& a, const WholeRows& weight, const int32_t* sums, int64_t vectors, int64_t stride,
                        const Range* ranges, int64_t first, int64_t tokens, int64_t row, int64_t end, const Sums& read = {}) {
  bool one = !a.quantization.dynamic;  // range for all tokens; of codes, one that holds NaN has a scale of its own
  for (int64_t t = first; t < first + tokens; t++) one &= ranges[t].scale == ranges[t].scale;
  with_answers(a, [&](auto as) {
    const auto finish = one ? finish_as<V, decltype(as), true, Sums> : finish_as<V, decltype(as), false, Sums>;
    finish(a, weight, sums, vectors, stride, ranges, first, tokens, row, end, read);
  });
}

}  // namespace
