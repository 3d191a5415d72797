// Answers that are codes of the next product's inputs: a byte each, and a mark behind each row that says whether its token is
// NaN. Scale, bias, normalisation, activation and rounding are done on a sum before it leaves, bit for bit as the layers do
// them one after the other (coded.py has the reference).
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "coded_answer.h"
#include "kernels/rounded_once.h"
#include "kernels/whole_outputs.h"

namespace {

using twofour::CodeStep;
using twofour::kBitsOfRow;

// Codes that are a number times a factor, rounded, and clipped: what plain rounding, ReLU and clips are.
template <class V>
struct RoundedCodes {
  static constexpr int tokens = 1;
  const Rounder<V> rounder;
  explicit TWOFOUR_INLINE RoundedCodes(const Matmul& a)
      : rounder(1.0f / a.quantization.y_scale, a.quantization.y_zero, a.coded->least, a.coded->most) {}
  template <int N>
  TWOFOUR_INLINE void make(const typename V::reg (&y)[N], typename V::ints (&codes)[N]) const {
    TWOFOUR_UNROLL
    for (int i = 0; i < N; i++) codes[i] = rounder(y[i]);
  }
};

// Codes of any function of one number: a line is cut into steps of one width, and of each is known where in it the code
// changes, and between which two.
template <class V>
struct SteppedCodes {
  typedef typename V::I I;
  typedef typename V::U U;
  static constexpr int tokens = 1;
  const CodeStep* const steps;
  const uint32_t* const bits;
  const typename V::reg factor, offset, last;

  explicit TWOFOUR_INLINE SteppedCodes(const Matmul& a)
      : steps(a.coded->steps), bits(a.coded->bits), factor(V::all(a.coded->factor)), offset(V::all(a.coded->offset)),
        last(V::all(static_cast<float>(a.coded->count - 1))) {}

  template <int N>
  TWOFOUR_INLINE void make(const typename V::reg (&y)[N], typename V::ints (&codes)[N]) const {
    for (int i = 0; i < N; i++) codes[i] = one(y[i]);
  }
  TWOFOUR_INLINE typename V::ints one(typename V::reg y) const {
    const auto at = V::to_ints(V::min(V::max(apart(y * factor) + offset, V::zero()), last));  // of NaN the first
    I begin, codes;
    step((I)at, &begin, &codes);
    const I number = (I)y, order = number ^ (number >> 31 & INT32_MAX);
    static_assert(kBitsOfRow == 1 << 8);
    const I above = order >= begin + (I)((U)codes >> 16 & 0xff00);  // rows * kBitsOfRow
    const I within = (order >= begin) & ~above;
    codes = (I)((U)codes >> (U)(above & 8));
    if (any(within)) [[unlikely]] codes = exactly(order, begin, codes, within);
    return (typename V::ints)(codes & 255);
  }
  // Each lane's entry of the table: where its change begins, and its four bytes.
  TWOFOUR_INLINE void step(I at, I* begin, I* codes) const {
#if defined(TWOFOUR_SET_avx512)
    *begin = (I)_mm512_i32gather_epi32((__m512i)at, &steps->begin, 8);
    *codes = (I)_mm512_i32gather_epi32((__m512i)at, &steps->below, 8);
#elif defined(TWOFOUR_SET_avx2)
    *begin = (I)_mm256_i32gather_epi32(&steps->begin, (__m256i)at, 8);
    *codes = (I)_mm256_i32gather_epi32(reinterpret_cast<const int*>(&steps->below), (__m256i)at, 8);
#else
    for (int i = 0; i < V::width; i++) {
      (*begin)[i] = steps[at[i]].begin;
      int32_t four;
      std::memcpy(&four, &steps[at[i]].below, 4);
      (*codes)[i] = four;
    }
#endif
  }
  static TWOFOUR_INLINE bool any(I lanes) {
#if defined(TWOFOUR_SET_avx512)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif defined(TWOFOUR_SET_avx2)
    return _mm256_movemask_epi8((__m256i)lanes) != 0;
#else
    int32_t found = 0;
    for (int i = 0; i < V::width; i++) found |= lanes[i];
    return found != 0;
#endif
  }
  // Numbers so near to a change that the operators' own roundings decide, which a bit for each number says.
  TWOFOUR_NOINLINE I exactly(I order, I begin, I codes, I within) const {
    for (int i = 0; i < V::width; i++) {
      if (within[i] == 0) continue;
      const auto entry = static_cast<uint32_t>(codes[i]);
      const int32_t place = order[i] - begin[i];
      const uint32_t* row = bits + (entry >> 16 & 255) * (kBitsOfRow / 32);
      codes[i] = static_cast<int32_t>(entry >> (row[place / 32] >> place % 32 & 1 ? 8 : 0) & 255);
    }
    return codes;
  }
};

// Codes of an activation that there is a formula for: rounded where that surely is the right way, else looked up.
template <class V, Activation kind>
struct ActivatedCodes {
  static constexpr int tokens = 4;  // side by side: see by_tokens
  static constexpr float kRounds = 12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to whole numbers
  const SteppedCodes<V> stepped;
  const Rounder<V> rounder;
  const typename V::reg whole, margin;

  explicit TWOFOUR_INLINE ActivatedCodes(const Matmul& a)
      : stepped(a), rounder(1.0f / a.quantization.y_scale, a.quantization.y_zero, a.coded->least, a.coded->most),
        whole(V::all(kRounds + static_cast<float>(a.quantization.y_zero))), margin(V::all(a.coded->margin)) {}

  template <int N>
  TWOFOUR_INLINE void make(const typename V::reg (&y)[N], typename V::ints (&codes)[N]) const {
    const auto answers = activated<kind, Beside<V, N>>(Beside<V, N>::each([&](int i) TWOFOUR_INLINED { return y[i]; }));
    TWOFOUR_UNROLL
    for (int i = 0; i < N; i++) {
      const auto steps = V::min(V::max(answers.v[i] * rounder.factor, rounder.least), rounder.most);
      const auto sum = apart(steps + whole);  // its low byte is the code
      codes[i] = (typename V::ints)sum;
      if (unsure(V::magnitude(steps - apart(sum - whole)))) [[unlikely]] codes[i] = look_up(stepped, y[i]);
    }
  }
  TWOFOUR_INLINE bool unsure(typename V::reg off) const {
#if defined(TWOFOUR_SET_avx512)
    return _mm512_cmp_ps_mask(off, margin, _CMP_GT_OQ) != 0;
#else
    return SteppedCodes<V>::any((typename V::I)(off > margin));
#endif
  }
  // Of a vector alone, by value: what has an address is stored before every branch.
  static TWOFOUR_NOINLINE typename V::ints look_up(const SteppedCodes<V>& stepped, typename V::reg y) {
    return stepped.one(y);
  }
};

// The answers of V::width outputs from `row` on, those below `end`.
template <class V, class Make>
struct CodedAnswers {
  const Make codes;
  const int64_t row, rows, stride, end;
  uint8_t* const y;
  const bool normed;
  const typename V::reg bias, factor, shift;

  TWOFOUR_INLINE CodedAnswers(const Matmul& a, int64_t first, int64_t last)
      : codes(a), row(first), rows(least(last - first, V::width)), stride(a.y_stride), end(last),
        y(static_cast<uint8_t*>(a.y)), normed(a.coded->scale != nullptr),
        bias(a.bias == nullptr ? V::zero() : V::load(a.bias + first, rows)),
        factor(normed ? V::load(a.coded->scale + first, rows) : V::zero()),
        shift(normed ? V::load(a.coded->shift + first, rows) : V::zero()) {}

  // Scaled sums of N tokens from `token` on, whose ranges are `ranges`.
  template <int N>
  TWOFOUR_INLINE void leave(const typename V::reg (&scaled)[N], int64_t token, const Range* ranges) const {
    typename V::reg sums[N];
    typename V::ints made[N];
    TWOFOUR_UNROLL
    for (int i = 0; i < N; i++) {
      sums[i] = apart(apart(scaled[i]) + bias);
      if (normed) sums[i] = rounded_once<V>(sums[i], factor, shift);
    }
    codes.make(sums, made);
    TWOFOUR_UNROLL
    for (int i = 0; i < N; i++) {
      uint8_t* to = y + (token + i) * stride;
      V::store_bytes(to + row, made[i], rows);
      if (row + rows == end) to[end] = ranges[i].scale != ranges[i].scale;
    }
  }
};

template <class Make>
struct CodesConstant {
  using type = Make;
};

// Calls use(CodesConstant).
template <class V, class Use>
inline void with_codes(const Matmul& a, const Use& use) {
  if (a.coded->steps == nullptr) return use(CodesConstant<RoundedCodes<V>>{});
  if (a.coded->margin > 0) {
    const Activation kind = a.epilogue.activation;
    if (kind == Activation::gelu) return use(CodesConstant<ActivatedCodes<V, Activation::gelu>>{});
    if (kind == Activation::gelu_tanh) return use(CodesConstant<ActivatedCodes<V, Activation::gelu_tanh>>{});
    if (kind == Activation::silu) return use(CodesConstant<ActivatedCodes<V, Activation::silu>>{});
  }
  use(CodesConstant<SteppedCodes<V>>{});
}

// As finish_sums, to codes.
template <class V, class Make, class Sums>
TWOFOUR_NOINLINE void hand_on_sums(const Matmul& a, const WholeRows& weight, const int32_t* sums, int64_t vectors,
                                   int64_t stride, const Range* ranges, int64_t first, int64_t tokens, int64_t row,
                                   const Sums& read) {
  const int64_t end = a.out_features;
  for (int64_t v = 0; v < vectors && row + v * V::width < end; v++) {
    const int64_t at = row + v * V::width;
    const CodedAnswers<V, Make> answers(a, at, end);
    const auto scale = V::load_unaligned(weight.scales + at);
    const auto values = (typename V::ints)V::load_unaligned(reinterpret_cast<const float*>(weight.sums) + at);
    const auto some = [&](int64_t t, auto count) TWOFOUR_INLINED {
      typename V::reg scaled[count.value];
      TWOFOUR_UNROLL
      for (int i = 0; i < count.value; i++) {
        const Range range = ranges[first + t + i];
        const auto sum = read(sums + (v * stride + t + i) * V::width, first + t + i);
        scaled[i] = V::to_real(V::minus_product(sum, values, range.zero)) * (V::all(range.scale) * scale);
      }
      answers.leave(scaled, first + t, ranges + first + t);
    };
    int64_t t = 0;
    for (; t + Make::tokens <= tokens; t += Make::tokens) some(t, std::integral_constant<int, Make::tokens>{});
    if constexpr (Make::tokens > 2)
      for (; t + 2 <= tokens; t += 2) some(t, std::integral_constant<int, 2>{});
    for (; t < tokens; t++) some(t, std::integral_constant<int, 1>{});
  }
}

}  // namespace
