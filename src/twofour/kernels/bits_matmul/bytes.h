// Dots of bytes: a dword of four codes of a token beside four stored codes of each output. Stored codes are bytes, or 1, 2
// or 4 bits that are taken apart in registers, so that few tokens read fewer bytes of a weight.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>

#include "kernels/byte_dots.h"
#include "tokens.h"

namespace {

using twofour::kBytesPanel;
using twofour::kMostInGroup;

struct ByteDots {
  using V = WholeLanes;
  using Sum = V::ints;
#if defined(TWOFOUR_SET_avx512)
  static constexpr int columns = 4, tokens = 6;  // 24 of 32 registers hold sums
#elif defined(TWOFOUR_SET_avx_vnni)
  static constexpr int columns = 2, tokens = 6;  // 12 of 16
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
};

// Sums of `columns` vectors of outputs for T tokens, whose inputs are dwords, to sums[columns][stride tokens][width].
template <class D, bool narrow, int T, class Inputs>
TWOFOUR_NOINLINE void byte_tile(const char* w, const Inputs& x, int64_t blocks, int32_t* sums, int64_t stride) {
  using V = typename D::V;
  constexpr int sets = sets_of_sums(T * D::columns);
  typename D::Sum sum[sets][T][D::columns] = {};
  const auto add = [&](int set, int64_t b) TWOFOUR_INLINED {
    typename D::Sum weights[D::columns];
    TWOFOUR_UNROLL
    for (int c = 0; c < D::columns; c++) weights[c] = V::load_index(w + c * V::width * 4);
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      const auto four = D::four(x.at(t, b));
      TWOFOUR_UNROLL
      for (int c = 0; c < D::columns; c++) sum[set][t][c] = D::template dot<narrow>(sum[set][t][c], four, weights[c]);
    }
    w += kBytesPanel * 4;
  };
  int64_t b = 0;
  for (; b + sets <= blocks; b += sets) {
    TWOFOUR_UNROLL
    for (int s = 0; s < sets; s++) add(s, b + s);
  }
  for (; b < blocks; b++) add(0, b);
  TWOFOUR_UNROLL
  for (int c = 0; c < D::columns; c++) {
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      TWOFOUR_UNROLL
      for (int s = 1; s < sets; s++) sum[0][t][c] = V::add(sum[0][t][c], sum[s][t][c]);
      V::store_ints(sums + (c * stride + t) * V::width, sum[0][t][c]);
    }
  }
}

constexpr int64_t kBytesAhead = 4096;  // bytes of packed weights that are fetched before they are read
constexpr int32_t kCodesAround = 128;  // what codes of a token are less by where they are bytes with a sign

// Whether codes in so many neighbouring places of a byte can be multiplied where they stand, for T rows: registers suffice for
// sums of each place, and no pair of products passes 16 bits (AVX2).
template <class D, int bits, int T>
constexpr bool apart_fits(int places) {
  constexpr bool wide = D::V::width == 16;
  if (places * bits > (kDotsAreInstructions ? 8 : 7)) return false;
  if (kDotsAreInstructions && !wide) return places * T * D::columns <= 12;
  return places == 2 ? T * D::columns <= 8 : places * T * D::columns <= (wide ? 16 : 8);
}

// Sums of packed codes times bytes with a sign of T rows, of up to kMostInGroup inputs. Codes in `apart` neighbouring places
// of a byte are multiplied where they stand, each place in sums of its own, which are shifted at the end: a shift for every
// `apart` codes.
template <class D, int bits, int T, int most = 4>
struct CodeSums {
  using V = typename D::V;
  using Sum = typename D::Sum;
  static constexpr int apart = most == 4 && apart_fits<D, bits, T>(4) ? 4 : apart_fits<D, bits, T>(2) ? 2 : 1;
  Sum sum[apart][T][D::columns] = {};

  // Inputs 4 i ... 4 i + 3 of a block; `inputs` are those of each row.
  template <class Inputs>
  TWOFOUR_INLINE void add(const Sum (&packed)[D::columns], int i, const Inputs& inputs) {
    constexpr uint32_t mask = 0x01010101u * ((1u << bits) - 1);
    constexpr bool narrow = bits < 8;
    const int place = i % apart;
    Sum weights[D::columns];
    TWOFOUR_UNROLL
    for (int c = 0; c < D::columns; c++)
      weights[c] = (Sum)((typename V::U)packed[c] >> ((i - place) * bits) & mask << place * bits);
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      const auto four = D::four(inputs(t));
      TWOFOUR_UNROLL
      for (int c = 0; c < D::columns; c++) sum[place][t][c] = D::template dot<narrow>(sum[place][t][c], weights[c], four);
    }
  }
  TWOFOUR_INLINE Sum at(int t, int c) const {
    Sum all = sum[0][t][c];
    TWOFOUR_UNROLL
    for (int p = 1; p < apart; p++) all = V::add(all, (Sum)((typename V::I)sum[p][t][c] >> p * bits));
    return all;
  }
};

// Of blocks in turns, so that few sums do not wait for each other.
template <class D, int bits, int T, int most = 4>
struct CodeSumSets {
  using V = typename D::V;
  static constexpr int sets = sets_of_sums(CodeSums<D, bits, T, most>::apart * T * D::columns);
  CodeSums<D, bits, T, most> of[sets];

  TWOFOUR_INLINE void begin(int t, typename D::Sum sum) {
    TWOFOUR_UNROLL
    for (int c = 0; c < D::columns; c++) of[0].sum[0][t][c] = sum;
  }

  // Calls add(sums, block) for blocks [begin, end).
  template <class Add>
  TWOFOUR_INLINE void each(int64_t begin, int64_t end, const Add& add) {
    int64_t b = begin;
    for (; b + sets <= end; b += sets) {
      TWOFOUR_UNROLL
      for (int s = 0; s < sets; s++) add(of[s], b + s);
    }
    for (; b < end; b++) add(of[0], b);
  }
  TWOFOUR_INLINE typename D::Sum at(int t, int c) const {
    auto all = of[0].at(t, c);
    TWOFOUR_UNROLL
    for (int s = 1; s < sets; s++) all = V::add(all, of[s].at(t, c));
    return all;
  }
};

// As byte_tile, of packed codes and inputs with a sign.
template <class D, int bits, int T, class Inputs>
TWOFOUR_NOINLINE void packed_tile(const char* w, const Inputs& x, int64_t blocks, int32_t* sums, int64_t stride) {
  using V = typename D::V;
  constexpr int per = 8 / bits;
  constexpr int64_t most = kMostInGroup / (4 * per);
  for (int64_t first = 0; first < blocks; first += most) {
    CodeSumSets<D, bits, T> part;
    part.each(first, least(blocks, first + most), [&](auto& sums_of, int64_t b) TWOFOUR_INLINED {
      typename D::Sum packed[D::columns];
      // Held: a load of 64 bytes takes Zen 4 a cycle, as a dot. Beside few dots one line of four is fetched: it does better alone.
      constexpr bool some = per * T > 2 || D::columns * V::width < kBytesPanel;
      TWOFOUR_UNROLL
      for (int c = 0; c < D::columns; c++) {
        const char* at = w + c * V::width * 4;
        packed[c] = some ? (typename D::Sum)V::load_shared(reinterpret_cast<const float*>(at)) : V::load_index(at);
        if (c == 0 || (some && c * V::width % 16 == 0)) __builtin_prefetch(at + kBytesAhead, 0, some ? 3 : 2);
      }
      TWOFOUR_UNROLL
      for (int i = 0; i < per; i++) sums_of.add(packed, i, [&](int t) { return x.at(t, per * b + i); });
      w += kBytesPanel * 4;
    });
    TWOFOUR_UNROLL
    for (int c = 0; c < D::columns; c++) {
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) {
        int32_t* to = sums + (c * stride + t) * V::width;
        const auto sum = part.at(t, c);
        V::store_ints(to, first == 0 ? sum : V::add(sum, V::load_ints(reinterpret_cast<const uint8_t*>(to))));
      }
    }
  }
}

// The tile of up to `tokens` tokens, and how many it takes of them.
template <class D, int bits, bool narrow, class Inputs>
struct ByteTile {
  void (*run)(const char*, const Inputs&, int64_t, int32_t*, int64_t);
  int64_t tokens;
  static ByteTile of(int64_t left) {
    if (left >= D::tokens) return {tile<D::tokens>(), D::tokens};
    if (D::tokens > 4 && left >= 4) return {tile<4>(), 4};
    if (left >= 3 && D::tokens > 3) return {tile<3>(), 3};
    if (left >= 2) return {tile<2>(), 2};
    return {tile<1>(), 1};
  }
  template <int T>
  static constexpr auto tile() {
    if constexpr (bits == 8) return byte_tile<D, narrow, T, Inputs>;
    else return packed_tile<D, bits, T, Inputs>;
  }
};

// Codes of token `t`, packed weights' other operand, become bytes with a sign: 128 less, and so are zero point and sum. What
// stands behind the inputs meets weights of code 0.
inline void signed_codes(const Matmul& a, int64_t t, uint8_t* codes, int64_t padded, const TokenFacts& facts) {
  for (int64_t k = 0; k < padded; k++) codes[k] ^= kCodesAround;
  facts.sums[t] = static_cast<int32_t>(static_cast<uint32_t>(facts.sums[t]) -
                                       static_cast<uint32_t>(kCodesAround) * static_cast<uint32_t>(a.in_features));
  facts.ranges[t].zero -= kCodesAround * a.quantization.x_factor;
}

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
        tile.run(w.panel(p) + c * 4, inputs, blocks, sums, tile.tokens);
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
      for (int64_t t = team.me; t < count; t += team.size) {
        token_codes<typename D::V>(a, pass + t, x + t * plan.token_bytes, plan.padded, facts);
        if constexpr (packed) signed_codes(a, pass + t, x + t * plan.token_bytes, plan.padded, facts);
      }
      team.barrier();
      with_widths<packed>(w.head.bits, a.quantization.x_most, [&](auto bits, auto narrow) {
        byte_panels<D, bits.value, narrow.value>(a, w, x, plan, facts, pass, count, begin, end);
      });
    }
  });
}

}  // namespace
