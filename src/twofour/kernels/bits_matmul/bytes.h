// Dots of bytes: a dword of four codes of a token beside four stored codes of each output. Stored codes are bytes, or 1, 2
// or 4 bits that are taken apart in registers, so that few tokens read fewer bytes of a weight.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>

#include "kernels/byte_dots.h"
#include "tokens.h"

namespace {

using twofour::kBytesPanel;

struct ByteDots {
  using V = WholeLanes;
  using Sum = V::ints;
#if defined(TWOFOUR_SET_avx512)
  static constexpr int columns = 4, tokens = 6;  // 24 of 32 registers hold sums
#elif defined(TWOFOUR_SET_avx2)
  static constexpr int columns = 2, tokens = 4;
#else
  static constexpr int columns = 2, tokens = 2;
#endif

  // `narrow`: no code of a token times a stored one reaches 2^14.
  template <bool narrow>
  static TWOFOUR_INLINE Sum dot(Sum sum, Sum x, Sum w) {
    return dot_bytes<V, narrow>(sum, x, w);
  }
  static TWOFOUR_INLINE Sum four(const uint32_t* x) {
    return (Sum)V::broadcast(reinterpret_cast<const float*>(x));
  }
  // Codes `i` of `bits` bits of every byte.
  template <int bits>
  static TWOFOUR_INLINE Sum codes(Sum packed, int i) {
    if constexpr (bits == 8) return packed;
    return (Sum)((V::U)packed >> (i * bits) & 0x01010101u * ((1u << bits) - 1));
  }
};

// Sums of `columns` vectors of outputs for T tokens, whose inputs are dwords, to sums[columns][T][width].
template <class D, int bits, bool narrow, int T, class Inputs>
TWOFOUR_NOINLINE void byte_tile(const char* w, const Inputs& x, int64_t blocks, int32_t* sums) {
  using V = typename D::V;
  constexpr int per = 8 / bits;
  typename D::Sum sum[T][D::columns] = {};
  for (int64_t b = 0; b < blocks; b++, w += kBytesPanel * 4) {
    TWOFOUR_UNROLL
    for (int i = 0; i < per; i++) {
      typename D::Sum weights[D::columns];
      TWOFOUR_UNROLL
      for (int c = 0; c < D::columns; c++)
        weights[c] = D::template codes<bits>(V::load_index(w + c * V::width * 4), i);
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) {
        const auto four = D::four(x.at(t, per * b + i));
        TWOFOUR_UNROLL
        for (int c = 0; c < D::columns; c++) sum[t][c] = D::template dot<narrow>(sum[t][c], four, weights[c]);
      }
    }
  }
  TWOFOUR_UNROLL
  for (int c = 0; c < D::columns; c++) {
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) V::store_ints(sums + (c * T + t) * V::width, sum[t][c]);
  }
}

// The tile of up to `tokens` tokens, and how many it takes of them.
template <class D, int bits, bool narrow, class Inputs>
struct ByteTile {
  void (*run)(const char*, const Inputs&, int64_t, int32_t*);
  int64_t tokens;
  static ByteTile of(int64_t left) {
    if (left >= D::tokens) return {byte_tile<D, bits, narrow, D::tokens, Inputs>, D::tokens};
    if (D::tokens > 4 && left >= 4) return {byte_tile<D, bits, narrow, 4, Inputs>, 4};
    if (left >= 3 && D::tokens > 3) return {byte_tile<D, bits, narrow, 3, Inputs>, 3};
    if (left >= 2) return {byte_tile<D, bits, narrow, 2, Inputs>, 2};
    return {byte_tile<D, bits, narrow, 1, Inputs>, 1};
  }
};

// Panels [begin, end) for `count` tokens from `first` on, whose codes are `x`.
template <class D, int bits, bool narrow>
void byte_panels(const Matmul& a, const BitsWeight& w, const uint8_t* x, const BitsPlan& plan, const TokenFacts& facts,
                 int64_t first, int64_t count, int64_t begin, int64_t end) {
  using V = typename D::V;
  constexpr int64_t together = D::columns * V::width;
  const int64_t blocks = ceil_div(a.in_features, 32 / bits);
  alignas(64) int32_t sums[D::tokens * together];
  for (int64_t p = begin; p < end; p++)
    for (int64_t t = 0; t < count;) {
      const auto tile = ByteTile<D, bits, narrow, TokenRows<uint32_t>>::of(count - t);
      const TokenRows<uint32_t> inputs{reinterpret_cast<const uint32_t*>(x + t * plan.token_bytes), plan.token_bytes / 4};
      for (int64_t c = 0; c < kBytesPanel && p * kBytesPanel + c < a.out_features; c += together) {
        tile.run(w.panel(p) + c * 4, inputs, blocks, sums);
        finish_codes<V>(a, w, sums, D::columns, tile.tokens, facts, first + t, tile.tokens, p * kBytesPanel + c);
      }
      t += tile.tokens;
    }
}

template <class D>
BitsPlan bytes_plan(const Matmul& a) {
  return BitsPlan(a, padded_inputs(a.in_features), D::tokens);
}

// Calls use(bits of a stored code, whether sums of two products fit 16 bits) with constants.
template <bool packed, class Use>
void with_widths(int64_t bits, int32_t most, const Use& use) {
  using No = std::integral_constant<bool, false>;
  using Yes = std::integral_constant<bool, true>;
  if constexpr (packed) {
    if (bits == 1) return use(std::integral_constant<int, 1>{}, Yes{});
    if (bits == 2) return use(std::integral_constant<int, 2>{}, Yes{});
    return use(std::integral_constant<int, 4>{}, Yes{});
  } else {
    if (most <= 127) return use(std::integral_constant<int, 8>{}, Yes{});
    return use(std::integral_constant<int, 8>{}, No{});
  }
}

template <class D, bool packed>
void bytes_product(const Matmul& a) {
  if (a.tokens <= 0) return;
  const BitsWeight w(*twofour::bits_layout(packed ? "bits_packed" : "bits_bytes"), a.weight, a.out_features, a.in_features);
  const BitsPlan plan = bytes_plan<D>(a);
  const TokenFacts facts(a.workspace, a.tokens);
  auto* x = static_cast<uint8_t*>(a.workspace) + plan.facts;
  with_team(a.threads, [&](const Team& team) {
    int64_t begin, end;
    team.share(w.panels, 1, &begin, &end);
    for (int64_t pass = 0; pass < a.tokens; pass += plan.per_pass) {
      const int64_t count = least(plan.per_pass, a.tokens - pass);
      if (pass > 0) team.barrier();  // the last tokens are still being read
      for (int64_t t = team.me; t < count; t += team.size)
        token_codes<typename D::V>(a, pass + t, x + t * plan.token_bytes, plan.padded, facts);
      team.barrier();
      with_widths<packed>(w.head.bits, a.quantization.x_most, [&](auto bits, auto narrow) {
        byte_panels<D, bits.value, narrow.value>(a, w, x, plan, facts, pass, count, begin, end);
      });
    }
  });
}

}  // namespace
