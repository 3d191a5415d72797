// The 64 sums of 6 codes, each of them or not: what 6 bits of a weight look up. Included by AVX-512 sources with VBMI.
#pragma once

#include <cstdint>

#include "bits.h"
#include "native/simd.h"

namespace {

using twofour::kTablesInputs;

// What follows from the greatest code of an input.
struct TableSums {
  bool bytes;          // whether a table's entries are bytes, not words
  int64_t entry;       // bytes of a table
  int64_t tokens;      // that have their tables at once
  int64_t per_byte, per_word;  // lookups whose sum fits
  explicit TableSums(int32_t most)
      : bytes(most <= 15), entry(bytes ? 64 : 128), tokens(bytes ? 32 : 16), per_byte(255 / (kTablesInputs * most)),
        per_word(65535 / (kTablesInputs * most)) {}
};

struct Spread {
  alignas(64) uint8_t code[3][64], low[4][64], high[4][64];
  alignas(64) uint16_t code_words[3][32], low_words[2][32], high_words[2][2][32];
};
constexpr Spread spread_of_tables() {
  Spread s{};
  for (int j = 0; j < 64; j++) {
    for (int b = 0; b < 3; b++) s.code[b][j] = static_cast<uint8_t>(3 * (j / 8) + b);
    for (int g = 0; g < 4; g++) {
      s.low[g][j] = static_cast<uint8_t>(16 * g + j % 8);
      s.high[g][j] = static_cast<uint8_t>(16 * g + 8 + j / 8);
    }
  }
  for (int j = 0; j < 32; j++) {
    for (int b = 0; b < 3; b++) s.code_words[b][j] = s.code[b][j];
    for (int g = 0; g < 2; g++) {
      s.low_words[g][j] = s.low[g][j];
      for (int h = 0; h < 2; h++) s.high_words[g][h][j] = s.high[g][32 * h + j];
    }
  }
  return s;
}

// Tables of `groups` groups of 6 codes of each of some rows, bytes, those of a row `stride` apart: of four groups the 8 sums of
// every 3 codes first, then each group's 64 of its two. Rows of codes and of tables stand so many bytes apart.
TWOFOUR_NOINLINE inline void tables_of_rows(const uint8_t* codes, int64_t codes_apart, int64_t rows, int64_t groups, uint8_t* to,
                                            int64_t to_apart, int64_t stride) {
  static constexpr Spread spread = spread_of_tables();
  constexpr __mmask64 has[3] = {0xaaaaaaaaaaaaaaaa, 0xcccccccccccccccc, 0xf0f0f0f0f0f0f0f0};
  __m512i code[3], high[4];
  alignas(64) uint64_t eights[8];
  const auto held = [](const uint8_t* from) {
    __m512i v = _mm512_load_si512(from);
    asm("" : "+v"(v));  // else gcc reads it again at each use
    return v;
  };
  TWOFOUR_UNROLL
  for (int b = 0; b < 3; b++) code[b] = held(spread.code[b]);
  TWOFOUR_UNROLL
  for (int q = 0; q < 4; q++) high[q] = held(spread.high[q]);
  for (; rows-- > 0; codes += codes_apart, to += to_apart)
    for (int64_t g = 0; g < groups; g += 4) {
      const auto* from = reinterpret_cast<const __m256i*>(codes + kTablesInputs * g);
      const __m512i v = _mm512_castsi256_si512(_mm256_loadu_si256(from));
      __m512i threes = _mm512_setzero_si512();
      TWOFOUR_UNROLL
      for (int b = 0; b < 3; b++) threes = _mm512_add_epi8(threes, _mm512_maskz_permutexvar_epi8(has[b], code[b], v));
      _mm512_store_si512(eights, threes);
      asm("" : "+m"(eights));  // broadcasts are loads, which take no port of permutations
      TWOFOUR_UNROLL
      for (int q = 0; q < 4; q++) {
        if (g + q >= groups) break;
        const __m512i low = _mm512_set1_epi64(static_cast<int64_t>(eights[2 * q]));
        const __m512i sum = _mm512_add_epi8(low, _mm512_permutexvar_epi8(high[q], threes));
        _mm512_store_si512(to + (g + q) * stride, sum);
      }
    }
}

inline void byte_tables(const uint8_t* codes, int64_t groups, uint8_t* to, int64_t stride) {
  tables_of_rows(codes, 0, 1, groups, to, 0, stride);
}

// The same of words, of two groups at a time.
TWOFOUR_NOINLINE inline void word_tables(const uint8_t* codes, int64_t groups, uint8_t* to, int64_t stride) {
  static constexpr Spread spread = spread_of_tables();
  constexpr __mmask32 has[3] = {0xaaaaaaaa, 0xcccccccc, 0xf0f0f0f0};
  for (int64_t g = 0; g < groups; g += 2) {
    const auto* from = reinterpret_cast<const __m128i*>(codes + kTablesInputs * g);
    const __m512i v = _mm512_castsi256_si512(_mm256_cvtepu8_epi16(_mm_loadu_si128(from)));
    __m512i threes = _mm512_setzero_si512();
    TWOFOUR_UNROLL
    for (int b = 0; b < 3; b++)
      threes = _mm512_add_epi16(threes, _mm512_maskz_permutexvar_epi16(has[b], _mm512_load_si512(spread.code_words[b]), v));
    TWOFOUR_UNROLL
    for (int q = 0; q < 2; q++) {
      if (g + q >= groups) break;
      const __m512i low = _mm512_permutexvar_epi16(_mm512_load_si512(spread.low_words[q]), threes);
      TWOFOUR_UNROLL
      for (int h = 0; h < 2; h++) {
        const __m512i high = _mm512_permutexvar_epi16(_mm512_load_si512(spread.high_words[q][h]), threes);
        _mm512_store_si512(to + (g + q) * stride + 64 * h, _mm512_add_epi16(low, high));
      }
    }
  }
}

}  // namespace
