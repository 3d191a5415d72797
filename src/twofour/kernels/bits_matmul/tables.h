// Tables: the 64 sums of 6 codes of a token that 6 bits of a weight can pick are looked up for 64 outputs by one vpermb,
// whatever the bits of a code. Sums of lookups stay bytes as long as they fit, then 16 bits, then 32. Inputs of more than
// four bits are two halves, so that several lookups fit a byte. Included by AVX-512 sources with VBMI; internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "tokens.h"

namespace {

using twofour::kTablesInputs;
using twofour::kTablesPanel;

constexpr int64_t kTablesChunk = 64;   // groups whose tables of a pair of tokens and bytes of a panel fit L1 together
constexpr int64_t kTablesTokens = 16;  // tokens that have their tables at once
constexpr int64_t kTablesPanels = 16;  // panels that are gone through with them
constexpr int kTablesVectors = 4;      // of outputs in a panel
constexpr int64_t kPairSums = 2 * kTablesVectors * 2 * 32;  // numbers of 16 bits: tokens, vectors, even and odd outputs

// Half `h` of the bits of a code: from bit `shift` on, up to `most`.
struct CodeHalf {
  int shift, most;
  int64_t per_byte() const { return 255 / (kTablesInputs * most); }      // lookups whose sum fits a byte
  int64_t per_word() const { return 65535 / (kTablesInputs * most); }    // 16 bits
};

struct CodeHalves {
  int count;
  CodeHalf half[2];
  explicit CodeHalves(int32_t most) {
    int bits = 1;
    while (most >> bits != 0) bits++;
    const int low = bits > 4 ? (bits + 1) / 2 : bits;
    count = bits > 4 ? 2 : 1;
    half[0] = {0, (1 << low) - 1};
    half[1] = {low, (1 << (bits - low)) - 1};
  }
};

struct Spread {
  alignas(64) uint8_t code[3][64], low[4][64], high[4][64];
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
  return s;
}

// Tables of `groups` groups of 6 codes, 64 bytes each, `stride` apart: of four groups the 8 sums of every 3 codes first,
// then each group's 64 of its two.
TWOFOUR_NOINLINE void token_tables(const uint8_t* codes, CodeHalf half, int64_t groups, uint8_t* to, int64_t stride) {
  static constexpr Spread spread = spread_of_tables();
  const __m512i most = _mm512_set1_epi8(static_cast<char>(half.most));
  const __m128i shift = _mm_cvtsi32_si128(half.shift);
  constexpr __mmask64 has[3] = {0xaaaaaaaaaaaaaaaa, 0xcccccccccccccccc, 0xf0f0f0f0f0f0f0f0};
  for (int64_t g = 0; g < groups; g += 4) {
    __m512i v = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + kTablesInputs * g)));
    v = _mm512_and_si512(_mm512_srl_epi16(v, shift), most);
    __m512i threes = _mm512_setzero_si512();
    TWOFOUR_UNROLL
    for (int b = 0; b < 3; b++)
      threes = _mm512_add_epi8(threes, _mm512_maskz_permutexvar_epi8(has[b], _mm512_load_si512(spread.code[b]), v));
    TWOFOUR_UNROLL
    for (int q = 0; q < 4; q++) {
      if (g + q >= groups) break;
      const __m512i low = _mm512_permutexvar_epi8(_mm512_load_si512(spread.low[q]), threes);
      const __m512i high = _mm512_permutexvar_epi8(_mm512_load_si512(spread.high[q]), threes);
      _mm512_store_si512(to + (g + q) * stride, _mm512_add_epi8(low, high));
    }
  }
}

// Adds the lookups of `groups` groups for T tokens and a panel to `sums`, [token][vector][even, odd][32]. Bytes 2 j and
// 2 j + 1 of a vector are outputs j and 32 + j. The even ones are the sums of words less the odd ones: modulo 2^16 no mask.
template <int T>
TWOFOUR_NOINLINE void table_tile(const uint8_t* tables, const uint8_t* w, int64_t groups, int64_t per_byte, bool first,
                                 uint16_t* sums) {
  __m512i words[T][kTablesVectors], odds[T][kTablesVectors];
  TWOFOUR_UNROLL
  for (int t = 0; t < T; t++) {
    TWOFOUR_UNROLL
    for (int v = 0; v < kTablesVectors; v++) {
      const uint16_t* from = sums + (t * kTablesVectors + v) * 64;
      words[t][v] = first ? _mm512_setzero_si512() : _mm512_load_si512(from);
      odds[t][v] = first ? _mm512_setzero_si512() : _mm512_load_si512(from + 32);
    }
  }
  for (int64_t g = 0; g < groups;) {
    const int64_t stop = least(groups, g + per_byte);
    __m512i bytes[T][kTablesVectors];
    const auto look = [&](bool begin) {
      __m512i index[kTablesVectors];
      TWOFOUR_UNROLL
      for (int v = 0; v < kTablesVectors; v++) {
        index[v] = _mm512_load_si512(w + v * 64);
        asm("" : "+v"(index[v]));  // else gcc loads it again for every token
      }
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) {
        __m512i table = _mm512_load_si512(tables + t * 64);
        asm("" : "+v"(table));
        TWOFOUR_UNROLL
        for (int v = 0; v < kTablesVectors; v++) {
          const __m512i found = _mm512_permutexvar_epi8(index[v], table);
          bytes[t][v] = begin ? found : _mm512_add_epi8(bytes[t][v], found);
        }
      }
      w += kTablesPanel;
      tables += 2 * 64;
      g++;
    };
    look(true);
    while (g < stop) look(false);
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      TWOFOUR_UNROLL
      for (int v = 0; v < kTablesVectors; v++) {
        words[t][v] = _mm512_add_epi16(words[t][v], bytes[t][v]);
        odds[t][v] = _mm512_add_epi16(odds[t][v], _mm512_srli_epi16(bytes[t][v], 8));
      }
    }
  }
  TWOFOUR_UNROLL
  for (int t = 0; t < T; t++) {
    TWOFOUR_UNROLL
    for (int v = 0; v < kTablesVectors; v++) {
      uint16_t* to = sums + (t * kTablesVectors + v) * 64;
      _mm512_store_si512(to, words[t][v]);
      _mm512_store_si512(to + 32, odds[t][v]);
    }
  }
}

// Sums of 16 bits of a token and panel, shifted, into whole[16 vectors][stride tokens][16]: added, or the first.
inline void widen(const uint16_t* sums, int shift, int64_t stride, bool first, int32_t* whole) {
  const __m128i by = _mm_cvtsi32_si128(shift);
  for (int v = 0; v < kTablesVectors; v++) {
    const __m512i words = _mm512_load_si512(sums + v * 64), odd = _mm512_load_si512(sums + v * 64 + 32);
    const __m512i even = _mm512_sub_epi16(words, _mm512_slli_epi16(odd, 8));
    const __m256i parts[4] = {_mm512_castsi512_si256(even), _mm512_extracti64x4_epi64(even, 1),
                              _mm512_castsi512_si256(odd), _mm512_extracti64x4_epi64(odd, 1)};
    TWOFOUR_UNROLL
    for (int i = 0; i < 4; i++) {
      int32_t* to = whole + (v * 4 + i) * stride * 16;
      const __m512i wide = _mm512_sll_epi32(_mm512_cvtepu16_epi32(parts[i]), by);
      _mm512_store_si512(to, first ? wide : _mm512_add_epi32(wide, _mm512_load_si512(to)));
    }
  }
}

// What a member of the team writes: tables of a chunk, sums of 16 bits of a segment, and whole sums.
struct TablesScratch {
  int64_t panels, planes, tables, sums, whole;
  explicit TablesScratch(const Matmul& a)
      : panels(least(kTablesPanels, ceil_div(a.out_features, kTablesPanel))),
        planes(static_cast<const BitsHead*>(a.weight)->bits * CodeHalves(a.quantization.x_most).count),
        tables(kTablesChunk * kTablesTokens * 64), sums(planes * panels * kTablesTokens / 2 * kPairSums * 2),
        whole(panels * kTablesPanel * kTablesTokens * 4) {}
  int64_t bytes() const { return tables + sums + whole; }
};

struct TablesWork {
  const Matmul& a;
  const BitsWeight& w;
  const CodeHalves& halves;
  const TablesScratch& scratch;
  char* memory;
  int64_t groups, plane_bytes;

  uint8_t* tables(int64_t pair) const { return reinterpret_cast<uint8_t*>(memory) + pair * kTablesChunk * 128; }
  uint16_t* sums(int64_t plane, int64_t panel, int64_t pair) const {
    return reinterpret_cast<uint16_t*>(memory + scratch.tables) +
           ((plane * scratch.panels + panel) * (kTablesTokens / 2) + pair) * kPairSums;
  }
  int32_t* whole(int64_t panel) const {
    return reinterpret_cast<int32_t*>(memory + scratch.tables + scratch.sums) + panel * kTablesPanel * kTablesTokens;
  }

  // The lookups of groups [begin, begin + count) of one half of the codes.
  void chunk(int h, const uint8_t* codes, int64_t stride, int64_t tokens, int64_t panel, int64_t panels, int64_t begin,
             int64_t count, bool first) const {
    const CodeHalf half = halves.half[h];
    for (int64_t t = 0; t < tokens; t++)
      token_tables(codes + t * stride + begin * kTablesInputs, half, count, tables(t / 2) + t % 2 * 64, 128);
    for (int64_t p = 0; p < panels; p++)
      for (int64_t plane = 0; plane < w.head.bits; plane++) {
        const auto* bytes = reinterpret_cast<const uint8_t*>(w.panel(panel + p)) + plane * plane_bytes + begin * kTablesPanel;
        for (int64_t t = 0; t < tokens; t += 2)
          (tokens - t > 1 ? table_tile<2> : table_tile<1>)(tables(t / 2), bytes, count, half.per_byte(), first,
                                                          sums(plane * halves.count + h, p, t / 2));
      }
  }
  void widen_all(int h, int64_t tokens, int64_t panels, bool first) const {
    for (int64_t p = 0; p < panels; p++)
      for (int64_t plane = 0; plane < w.head.bits; plane++)
        for (int64_t t = 0; t < tokens; t++)
          widen(sums(plane * halves.count + h, p, t / 2) + t % 2 * (kPairSums / 2),
                static_cast<int>(plane) + halves.half[h].shift, kTablesTokens, first && plane == 0, whole(p) + t * 16);
  }
  // Whole sums of up to kTablesTokens tokens and `panels` panels from `panel` on.
  void run(const uint8_t* codes, int64_t stride, int64_t tokens, int64_t panel, int64_t panels) const {
    for (int h = 0; h < halves.count; h++) {
      const int64_t segment = halves.half[h].per_word() / kTablesChunk * kTablesChunk;
      for (int64_t s = 0; s < groups; s += segment) {
        const int64_t stop = least(groups, s + segment);
        for (int64_t g = s; g < stop; g += kTablesChunk)
          chunk(h, codes, stride, tokens, panel, panels, g, least(kTablesChunk, stop - g), g == s);
        widen_all(h, tokens, panels, h == 0 && s == 0);
      }
    }
  }
};

inline BitsPlan tables_plan(const Matmul& a) { return BitsPlan(a, padded_inputs(a.in_features), kTablesTokens); }

inline int64_t tables_workspace(const Matmul& a) {
  return round_up(tables_plan(a).bytes(), 64) + (a.threads > 1 ? a.threads : 1) * TablesScratch(a).bytes();
}

inline void tables_product(const Matmul& a) {
  if (a.tokens <= 0) return;
  const BitsWeight w(*twofour::bits_layout("bits_tables"), a.weight, a.out_features, a.in_features);
  const BitsPlan plan = tables_plan(a);
  const TokenFacts facts(a.workspace, a.tokens);
  const CodeHalves halves(a.quantization.x_most);
  const TablesScratch scratch(a);
  auto* memory = static_cast<char*>(a.workspace);
  auto* x = reinterpret_cast<uint8_t*>(memory + plan.facts);
  with_team(a.threads, [&](const Team& team) {
    const int64_t groups = ceil_div(a.in_features, kTablesInputs);
    const TablesWork work{a, w, halves, scratch, memory + round_up(plan.bytes(), 64) + team.me * scratch.bytes(), groups,
                          groups * kTablesPanel};
    for (int64_t pass = 0; pass < a.tokens; pass += plan.per_pass) {
      const int64_t count = least(plan.per_pass, a.tokens - pass), blocks = ceil_div(count, kTablesTokens);
      if (pass > 0) team.barrier();  // the last tokens are still being read
      for (int64_t t = team.me; t < count; t += team.size)
        token_codes<WholeLanes>(a, pass + t, x + t * plan.token_bytes, plan.padded, facts);
      team.barrier();
      // Members share tokens where there are enough, since each makes tables of its own, else panels.
      int64_t b0 = 0, b1 = blocks, p0 = 0, p1 = w.panels;
      if (blocks >= team.size) team.share(blocks, 1, &b0, &b1);
      else team.share(w.panels, 1, &p0, &p1);
      for (int64_t p = p0; p < p1; p += scratch.panels)
        for (int64_t b = b0; b < b1; b++) {
          const int64_t first = b * kTablesTokens, some = least(kTablesTokens, count - first);
          const int64_t panels = least(scratch.panels, p1 - p);
          work.run(x + first * plan.token_bytes, plan.token_bytes, some, p, panels);
          for (int64_t q = 0; q < panels; q++)
            finish_codes<WholeLanes>(a, w, work.whole(q), kTablesPanel / 16, kTablesTokens, facts, pass + first, some,
                                     (p + q) * kTablesPanel);
        }
    }
  });
}

}  // namespace
