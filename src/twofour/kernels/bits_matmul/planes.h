// Bit planes: sum_k u v = sum over planes s, t of 2^(s + t) popcount(u_s & v_t). Outputs are lanes, so that no sum crosses
// lanes; planes of one significance are added before the sums are doubled for the next lower one (Horner).
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>

#include "tokens.h"

namespace {

using twofour::kPlanesPanel;

#if defined(TWOFOUR_SET_avx512_vpopcntdq)
struct PlaneCounts {
  using V = WholeLanes;
  using Word = __m512i;
  static constexpr int lanes = 8, columns = 4, tokens = 4;
  static constexpr int64_t most = 0;  // words until counts have to be added up: they are sums themselves

  static TWOFOUR_INLINE Word load(const uint64_t* p) { return _mm512_load_si512(p); }
  static TWOFOUR_INLINE Word all(uint64_t v) { return _mm512_set1_epi64(static_cast<long long>(v)); }
  static TWOFOUR_INLINE Word count(Word sum, Word a, Word b) {
    return _mm512_add_epi64(sum, _mm512_popcnt_epi64(_mm512_and_si512(a, b)));
  }
  static TWOFOUR_INLINE void store_low(int32_t* p, Word v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi64_epi32(v));
  }
  static TWOFOUR_INLINE uint64_t plane(const uint8_t* codes, int p) {
    return _mm512_test_epi8_mask(_mm512_loadu_si512(codes), _mm512_set1_epi8(static_cast<char>(1 << p)));
  }
};
#elif defined(TWOFOUR_SET_avx2)
struct PlaneCounts {
  using V = WholeLanes;
  using Word = __m256i;
  static constexpr int lanes = 4, columns = 2, tokens = 2;
  static constexpr int64_t most = 31;  // of at most 8 in a byte

  static TWOFOUR_INLINE Word load(const uint64_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
  static TWOFOUR_INLINE Word all(uint64_t v) { return _mm256_set1_epi64x(static_cast<long long>(v)); }
  // Bytes of counts: each half of a byte looks its count up (Mula, Kurz, Lemire 2018, arXiv 1611.07612, section 3.1).
  static TWOFOUR_INLINE Word count(Word sum, Word a, Word b) {
    const Word counts = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4,  //
                                         0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4);
    const Word low = _mm256_set1_epi8(15), both = _mm256_and_si256(a, b);
    const Word lower = _mm256_shuffle_epi8(counts, _mm256_and_si256(both, low));
    const Word upper = _mm256_shuffle_epi8(counts, _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
    return _mm256_add_epi8(sum, _mm256_add_epi8(lower, upper));
  }
  static TWOFOUR_INLINE Word total(Word sum, Word counts) {
    return _mm256_add_epi64(sum, _mm256_sad_epu8(counts, _mm256_setzero_si256()));
  }
  static TWOFOUR_INLINE void store_low(int32_t* p, Word v) {
    const Word low = _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(low));
  }
  static TWOFOUR_INLINE uint64_t plane(const uint8_t* codes, int p) {
    uint64_t word = 0;
    TWOFOUR_UNROLL
    for (int h = 0; h < 2; h++) {
      const Word v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * h));
      const Word top = _mm256_sll_epi16(v, _mm_cvtsi32_si128(7 - p));  // bit p becomes the sign; what crosses is below it
      word |= uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(top))} << 32 * h;
    }
    return word;
  }
};
#else
struct PlaneCounts {
  using V = WholeLanes;
  typedef uint64_t Word;
  static constexpr int lanes = 1, columns = 4, tokens = 1;
  static constexpr int64_t most = 0;

  static TWOFOUR_INLINE Word load(const uint64_t* p) { return *p; }
  static TWOFOUR_INLINE Word all(uint64_t v) { return v; }
  static TWOFOUR_INLINE Word count(Word sum, Word a, Word b) {
    return sum + static_cast<uint64_t>(__builtin_popcountll(a & b));
  }
  static TWOFOUR_INLINE void store_low(int32_t* p, Word v) { *p = static_cast<int32_t>(v); }
  static TWOFOUR_INLINE uint64_t plane(const uint8_t* codes, int p) {
    uint64_t word = 0;
    for (int i = 0; i < 64; i++) word |= uint64_t{static_cast<uint8_t>(codes[i] >> p & 1)} << i;
    return word;
  }
};
#endif

// A token's planes as a kernel reads them: [plane][words].
template <class P>
inline void token_planes(const uint8_t* codes, int64_t bits, int64_t words, uint64_t* to) {
  for (int64_t p = 0; p < bits; p++)
    for (int64_t q = 0; q < words; q++) to[p * words + q] = P::plane(codes + 64 * q, static_cast<int>(p));
}

struct PlaneShape {
  int64_t words, w_bits, x_bits;
  int64_t plane;  // words from one plane of a token to the next
};

// Counts of words [begin, end) of one plane of each side, added to `sum`. `Ahead`: the words `ahead` of them are fetched into L2.
template <class P, int T, bool Ahead, class Inputs>
TWOFOUR_INLINE void plane_words(const uint64_t* weights, const Inputs& inputs, int64_t begin, int64_t end, int64_t ahead,
                                typename P::Word (&sum)[T][P::columns]) {
  for (int64_t q = begin; q < end; q++, weights += kPlanesPanel) {
    typename P::Word one[P::columns];
    TWOFOUR_UNROLL
    for (int c = 0; c < P::columns; c++) {
      one[c] = P::load(weights + c * P::lanes);
      if constexpr (Ahead && P::lanes > 1) __builtin_prefetch(weights + ahead + c * P::lanes, 0, 2);  // a line each
    }
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      const typename P::Word all = P::all(*inputs.at(t, q));
      TWOFOUR_UNROLL
      for (int c = 0; c < P::columns; c++) sum[t][c] = P::count(sum[t][c], all, one[c]);
    }
  }
}

// Sums of `columns` vectors of outputs for T tokens, to sums[vector of V][stride tokens][V::width].
template <class P, int T, class Inputs>
TWOFOUR_NOINLINE void plane_tile(const uint64_t* w, const Inputs& x, const PlaneShape& s, int64_t stride, int32_t* sums) {
  using Word = typename P::Word;
  constexpr int width = P::V::width;
  Word sum[T][P::columns] = {};
  for (int64_t level = s.w_bits + s.x_bits - 2; level >= 0; level--) {
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      TWOFOUR_UNROLL
      for (int c = 0; c < P::columns; c++) sum[t][c] += sum[t][c];
    }
    const int64_t lowest = level >= s.x_bits ? level - s.x_bits + 1 : 0;
    for (int64_t i = lowest; i <= level && i < s.w_bits; i++) {
      const uint64_t* weights = w + i * s.words * kPlanesPanel;
      const Inputs inputs = x.from((level - i) * s.plane);
      if constexpr (P::most == 0) {
        const int64_t ahead = s.w_bits * s.words * kPlanesPanel;  // a panel, of which each plane is read in turns with others
        if (s.w_bits > 1) plane_words<P, T, true>(weights, inputs, 0, s.words, ahead, sum);
        else plane_words<P, T, false>(weights, inputs, 0, s.words, ahead, sum);
      } else {
        for (int64_t q = 0; q < s.words; q += P::most) {
          Word counts[T][P::columns] = {};
          plane_words<P, T, false>(weights + q * kPlanesPanel, inputs, q, least(s.words, q + P::most), 0, counts);
          TWOFOUR_UNROLL
          for (int t = 0; t < T; t++) {
            TWOFOUR_UNROLL
            for (int c = 0; c < P::columns; c++) sum[t][c] = P::total(sum[t][c], counts[t][c]);
          }
        }
      }
    }
  }
  TWOFOUR_UNROLL
  for (int c = 0; c < P::columns; c++) {
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++)
      P::store_low(sums + (c * P::lanes / width * stride + t) * width + c * P::lanes % width, sum[t][c]);
  }
}

constexpr int64_t kPlanesTokens = 8;  // whose sums become answers together, while what was fetched for them is in L1

inline PlaneShape plane_shape(const Matmul& a) {
  const int64_t words = ceil_div(a.in_features, 64);
  return {words, static_cast<const BitsHead*>(a.weight)->bits, bits_of(a.quantization.x_most), words};
}

template <class P>
BitsPlan planes_plan(const Matmul& a) {
  const PlaneShape s = plane_shape(a);
  return BitsPlan(a, s.x_bits * s.words * 8, P::tokens);
}

template <class P>
int64_t planes_workspace(const Matmul& a) {
  const BitsPlan plan = planes_plan<P>(a);
  return round_up(plan.bytes(), 64) + (a.threads > 1 ? a.threads : 1) * plan.padded;
}

// Panels [begin, end) for `count` tokens from `first` of the call on, whose planes are `x`.
template <class P>
void plane_panels(const Matmul& a, const BitsWeight& w, const uint64_t* x, const PlaneShape& s, const TokenFacts& facts,
                  int64_t first, int64_t count, int64_t begin, int64_t end) {
  using V = typename P::V;
  constexpr int64_t outputs = P::columns * P::lanes;
  const int64_t token = s.x_bits * s.words;
  alignas(64) int32_t sums[kPlanesTokens * outputs];
  for (int64_t p = begin; p < end; p++) {
    const auto* weights = reinterpret_cast<const uint64_t*>(w.panel(p));
    for (int64_t c = 0; c < kPlanesPanel && p * kPlanesPanel + c < a.out_features; c += outputs)
      for (int64_t t = 0; t < count; t += kPlanesTokens) {
        const int64_t together = least(kPlanesTokens, count - t);
        for (int64_t i = 0; i < together;) {
          const int64_t some = together - i >= P::tokens ? P::tokens : 1;
          fetch_answers(a, first + t + i, some, p * kPlanesPanel + c, outputs);
          (some == P::tokens ? plane_tile<P, P::tokens, TokenRows<uint64_t>> : plane_tile<P, 1, TokenRows<uint64_t>>)(
              weights + c, TokenRows<uint64_t>{x + (t + i) * token, token}, s, kPlanesTokens, sums + i * V::width);
          i += some;
        }
        finish_codes<V>(a, w, sums, outputs / V::width, kPlanesTokens, facts, first + t, together, p * kPlanesPanel + c);
      }
  }
}

template <class P>
void planes_product(const Matmul& a) {
  if (a.tokens <= 0) return;
  const BitsWeight w(*twofour::bits_layout("bits_planes"), a.weight, a.out_features, a.in_features);
  const PlaneShape s = plane_shape(a);
  const BitsPlan plan = planes_plan<P>(a);
  const TokenFacts facts(a.workspace, a.tokens);
  auto* memory = static_cast<uint8_t*>(a.workspace);
  auto* x = reinterpret_cast<uint64_t*>(memory + plan.facts);
  with_team(a.threads, [&](const Team& team) {
    uint8_t* codes = memory + round_up(plan.bytes(), 64) + team.me * plan.padded;
    int64_t begin, end;
    team.share(w.panels, 1, &begin, &end);
    for (int64_t pass = 0; pass < a.tokens; pass += plan.per_pass) {
      const int64_t count = least(plan.per_pass, a.tokens - pass);
      if (pass > 0) team.barrier();  // the last tokens are still being read
      for (int64_t t = team.me; t < count; t += team.size) {
        token_codes<typename P::V>(a, pass + t, codes, plan.padded, facts);
        token_planes<P>(codes, s.x_bits, s.words, x + t * s.x_bits * s.words);
      }
      team.barrier();
      plane_panels<P>(a, w, x, s, facts, pass, count, begin, end);
    }
  });
}

}  // namespace
