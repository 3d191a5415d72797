// Tokens as codes of 1 to 8 bits, and sums of products of codes on their way to the answer. quantization.py has the rule
// by which real numbers become codes, in torch, bit for bit.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "bits.h"
#include "coded_rows.h"
#include "kernels/whole_outputs.h"
#include "native/team.h"

namespace {

constexpr int64_t kBitsPass = 4 << 20;  // bytes of tokens per pass over the weights
constexpr int64_t kTokenPad = 256;      // codes of a token are filled up with zeros to a multiple of these

// Every token of a call: its range, and the sum of its codes.
struct TokenFacts {
  Range* ranges;
  int32_t* sums;
  static int64_t bytes(int64_t tokens) { return 2 * round_up(tokens * 8, 64); }
  TokenFacts(void* memory, int64_t tokens)
      : ranges(static_cast<Range*>(memory)),
        sums(reinterpret_cast<int32_t*>(static_cast<char*>(memory) + round_up(tokens * 8, 64))) {}
};

// Bits of codes up to `most`.
inline int64_t bits_of(int32_t most) {
  int64_t bits = 1;
  while (most >> bits != 0) bits++;
  return bits;
}

// As range_of, where a range lies around zero: the codes 0 ... most stand for -h ... h, h the greatest magnitude, or, where
// a code is zero (factor 1), zero is that of half of the codes.
template <class V, class X>
TWOFOUR_INLINE Range centred_range(const X* x, int64_t in, int32_t most, int32_t factor) {
  const Span span = span_of<V>(x, in);
  const float height = -span.least > span.most ? -span.least : span.most;
  const int32_t zero = factor == 2 ? most : (most + 1) / 2, above = factor == 2 ? most : most > 1 ? most - zero : 1;
  float scale = height / static_cast<float>(above);
  if (scale < kLeastScale) scale = kLeastScale;
  return {span.finite ? scale : __builtin_nanf(""), zero};
}

// Odd levels: u = floor(x / (2 s) + (most + 1) / 2), zero and what lies above it upwards.
template <class V, class X>
TWOFOUR_INLINE void odd_levels(const X* x, int64_t in, Range range, uint8_t* to, int32_t most) {
  const auto factor = V::all(0.5f / range.scale), half = V::all(0.5f * static_cast<float>(most + 1));
  const auto least = V::zero(), last = V::all(static_cast<float>(most));
  for (int64_t k = 0; k < in; k += V::width) {
    typename V::reg scaled = V::load(x + k, in - k) * factor;
#if defined(__x86_64__)
    asm("" : "+v"(scaled));  // rounded before the sum, as the reference does
#elif defined(__aarch64__)
    asm("" : "+w"(scaled));
#endif
    const auto held = V::min(V::max(scaled + half, least), last);
    V::store_x((typename V::ints)__builtin_convertvector(held, typename V::I), to, k, 8);
  }
}

// The range of some numbers of one scale: the one that is given, or found on them.
template <class V, class X>
inline Range input_range(const twofour::Quantization& q, const X* x, int64_t count) {
  if (!q.dynamic) return {q.x_scale, q.x_zero};
  return q.x_centred ? centred_range<V>(x, count, q.x_most, q.x_factor) : range_of<V>(x, count, q.x_most);
}

// Their codes; whole vectors are stored.
template <class V, class X>
TWOFOUR_NOINLINE void input_codes(const twofour::Quantization& q, Range range, const X* x, int64_t count, uint8_t* to) {
  if (q.x_factor == 2) odd_levels<V>(x, count, range, to, q.x_most);
  else quantize_token<V>(x, count, range, to, 8, q.x_most);
}

template <class V, class X>
bool holds_nan(const X* x, int64_t count) {
  typename V::I found{};
  int64_t k = 0;
#if defined(TWOFOUR_SET_avx512)
  __mmask16 either = 0;  // of two vectors at a time
  for (; k + 2 * V::width <= count; k += 2 * V::width) {
    __builtin_prefetch(x + k + kInputsAhead);
    __builtin_prefetch(x + k + V::width + kInputsAhead);
    either |= _mm512_cmp_ps_mask(V::load_unaligned(x + k), V::load_unaligned(x + k + V::width), _CMP_UNORD_Q);
  }
  if (either != 0) return true;
#endif
  for (; k < count; k += V::width) {
    const typename V::reg v = V::load(x + k, count - k);
    found |= (typename V::I)(v != v);
  }
  int32_t lanes[V::width], any = 0;
  std::memcpy(lanes, &found, sizeof found);
  for (const int32_t lane : lanes) any |= lane;
  return any != 0;
}

// A token that holds NaN, which one range for all rounds to a code, has scale NaN.
template <class V, class X>
inline Range real_codes(const Matmul& a, const X* x, uint8_t* to) {
  const Range range = input_range<V>(a.quantization, x, a.in_features);
  input_codes<V>(a.quantization, range, x, a.in_features, to);
  if (!a.quantization.dynamic && holds_nan<V>(x, a.in_features)) return {__builtin_nanf(""), range.zero};
  return range;
}

// The sum of bytes, the bits of `flip` turned in each.
inline int32_t sum_of_bytes(const uint8_t* bytes, int64_t count, uint8_t flip = 0) {
  int64_t k = 0, sum = 0;
#if defined(TWOFOUR_SET_avx2)
  __m256i sums = _mm256_setzero_si256();
  for (; k + 32 <= count; k += 32) {
    const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + k)) ^ _mm256_set1_epi8(static_cast<char>(flip));
    sums = _mm256_add_epi64(sums, _mm256_sad_epu8(some, _mm256_setzero_si256()));
  }
  sum = sums[0] + sums[1] + sums[2] + sums[3];
#endif
  for (; k < count; k++) sum += bytes[k] ^ flip;
  return static_cast<int32_t>(sum);
}

// Token `t` of the call as codes; `padded` bytes of `to` are written, those behind the inputs zero.
template <class V>
inline void token_codes(const Matmul& a, int64_t t, uint8_t* to, int64_t padded, const TokenFacts& facts) {
  const int64_t in = a.in_features;
  if (a.x_type == Type::f32) {
    facts.ranges[t] = real_codes<V>(a, static_cast<const float*>(a.x) + t * a.x_stride, to);
  } else if (a.x_type == Type::bf16) {
    facts.ranges[t] = real_codes<V>(a, static_cast<const uint16_t*>(a.x) + t * a.x_stride, to);
  } else {
    const uint8_t* from = static_cast<const uint8_t*>(a.x) + t * a.x_stride;
    std::memcpy(to, from, static_cast<size_t>(in));
    const bool lost = a.marked && from[in] != 0;
    facts.ranges[t] = {lost ? __builtin_nanf("") : a.quantization.x_scale, a.quantization.x_zero};
  }
  std::memset(to + in, 0, static_cast<size_t>(padded - in));
  facts.sums[t] = sum_of_bytes(to, in);
}

// Inputs of a tile in rows: number `q` of token `t`.
template <class N>
struct TokenRows {
  const N* x;
  int64_t stride;
  TWOFOUR_INLINE const N* at(int t, int64_t q) const { return x + t * stride + q; }
  TokenRows from(int64_t n) const { return {x + n, stride}; }
};

// Whole vectors are stored, and read from every group on.
inline int64_t padded_inputs(int64_t in) { return round_up(in + 64, kTokenPad); }

// Sums over values, from those over stored codes and a token's codes.
template <class V>
struct ValueSums {
  int shift;             // steps between levels are 1 or 2
  uint32_t more;
  const int32_t* codes;  // their sums, of every token

  ValueSums(const Matmul& a, const BitsWeight& w, const TokenFacts& facts)
      : shift((a.quantization.x_factor == 2 ? 1 : 0) + (w.head.alpha == 2 ? 1 : 0)),
        more(static_cast<uint32_t>(a.quantization.x_factor) * static_cast<uint32_t>(w.head.beta)), codes(facts.sums) {}
  TWOFOUR_INLINE typename V::ints operator()(const int32_t* from, int64_t t) const {
    const auto sum = (typename V::U)V::load_ints(reinterpret_cast<const uint8_t*>(from));
    return (typename V::ints)((sum << shift) + more * static_cast<uint32_t>(codes[t]));
  }
};

// Sums over stored codes, [vector][stride tokens][V::width], to answers; `row` is that of the first vector.
template <class V>
inline void finish_codes(const Matmul& a, const BitsWeight& w, const int32_t* sums, int64_t vectors, int64_t stride,
                         const TokenFacts& facts, int64_t first, int64_t tokens, int64_t row) {
  const ValueSums<V> read(a, w, facts);
  const WholeRows weight{w.scales, w.sums};
  if (a.coded == nullptr)
    return finish_sums<V>(a, weight, sums, vectors, stride, facts.ranges, first, tokens, row, a.out_features, read);
  with_codes<V>(a, [&](auto made) {
    using Make = typename decltype(made)::type;
    hand_on_sums<V, Make>(a, weight, sums, vectors, stride, facts.ranges, first, tokens, row, read);
  });
}

// Fetches the places of answers that are made next: a store to a line that is in no cache waits for it.
// Forced inline: gcc 12 drops calls of a function that only prefetches.
TWOFOUR_INLINE void fetch_answers(const Matmul& a, int64_t token, int64_t tokens, int64_t row, int64_t rows) {
  const int64_t size = a.y_type == Type::f32 ? 4 : a.y_type == Type::bf16 ? 2 : 1;
  const int64_t bytes = least(rows, a.out_features - row) * size;
  for (int64_t t = token; t < token + tokens; t++) {
    const char* y = static_cast<const char*>(a.y) + (t * a.y_stride + row) * size;
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(y + b, 1);
  }
}

// The passes over the tokens of a call, whose layout of the tokens takes `token_bytes` each.
struct BitsPlan {
  int64_t padded, token_bytes, per_pass, facts;

  BitsPlan(const Matmul& a, int64_t bytes, int64_t grain)
      : padded(padded_inputs(a.in_features)), token_bytes(bytes),
        per_pass(least(round_up(a.tokens, grain), round_up(kBitsPass / bytes + 1, grain))),
        facts(TokenFacts::bytes(a.tokens)) {}
  int64_t bytes() const { return facts + per_pass * token_bytes; }
};

}  // namespace
