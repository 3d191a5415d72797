// Tables: the 64 sums of 6 codes of a token that 6 bits of a weight can pick are looked up, whatever the bits of a code: where
// they fit bytes (codes of up to four bits), for 64 outputs by one vpermb, and sums of lookups stay bytes as long as they fit,
// then 16 bits, then 32; else for 32 outputs by one vpermi2w. Included by AVX-512 sources with VBMI; internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "six_sums.h"
#include "tokens.h"

namespace {

using twofour::kTablesPanel;

constexpr int64_t kTablesChunk = 64;   // groups whose bytes of a panel stay in L1 while tables of all tokens pass
constexpr int64_t kTablesSlab = 1024;  // groups that few tokens have their tables of at once, so that panels are read in order
constexpr int64_t kTablesPanels = 16;  // panels that are gone through with the tables of a slab
constexpr int kTablesVectors = 4;      // of outputs in a panel
constexpr int64_t kPairSums = 2 * kTablesVectors * 2 * 32;  // numbers of 16 bits: tokens, vectors, even and odd outputs

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
  for (int i = 0; i < T * kTablesVectors; i++) {
    _mm512_store_si512(sums + i * 64, words[i / kTablesVectors][i % kTablesVectors]);
    _mm512_store_si512(sums + i * 64 + 32, odds[i / kTablesVectors][i % kTablesVectors]);
  }
}

TWOFOUR_INLINE void add_whole(__m256i words, __m128i shift, bool first, int32_t* to) {
  const __m512i wide = _mm512_sll_epi32(_mm512_cvtepu16_epi32(words), shift);
  _mm512_store_si512(to, first ? wide : _mm512_add_epi32(wide, _mm512_load_si512(to)));
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
    for (int i = 0; i < 4; i++) add_whole(parts[i], by, first, whole + (v * 4 + i) * stride * 16);
  }
}

// Adds the words that `index` picks of a table of two vectors.
TWOFOUR_INLINE void add_words(__m512i& sum, __m512i index, const __m512i (&table)[2]) {
  // As instructions of their own: of the builtins gcc 12 copies and stores the sums in every round of a loop.
  asm("vpermi2w %2, %1, %0" : "+v"(index) : "v"(table[0]), "v"(table[1]));
  asm("vpaddw %1, %0, %0" : "+v"(sum) : "v"(index));
}

// Lookups of words for T tokens and a panel, no more than fit 16 bits, shifted, into whole[16 vectors][stride tokens][16]:
// added, or the first. Of the words of a vector of bytes vpermi2w reads 6 bits, those of the even bytes. `Ahead`: as many groups
// behind these are fetched, into L2: what is computed meanwhile takes as long as memory does (one token alone takes less).
template <int T, bool Ahead>
TWOFOUR_NOINLINE void word_tile(const uint8_t* tables, const uint8_t* w, int64_t groups, int shift, int64_t stride, bool first,
                                int32_t* whole) {
  __m512i sums[T][kTablesVectors][2] = {};
  for (int64_t g = 0; g < groups; g++, w += kTablesPanel, tables += 2 * 128) {
    __m512i table[T][2];
    TWOFOUR_UNROLL
    for (int h = 0; h < 2 * T; h++) table[h / 2][h % 2] = _mm512_load_si512(tables + h * 64);
    TWOFOUR_UNROLL
    for (int v = 0; v < kTablesVectors; v++) {
      __m512i even = _mm512_load_si512(w + v * 64);
      asm("" : "+v"(even));  // else gcc loads it again for every token
      if constexpr (Ahead) __builtin_prefetch(w + groups * kTablesPanel + v * 64, 0, 2);
      const __m512i odd = _mm512_srli_epi16(even, 8);
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) {
        add_words(sums[t][v][0], even, table[t]);
        add_words(sums[t][v][1], odd, table[t]);
      }
    }
  }
  const __m128i by = _mm_cvtsi32_si128(shift);
  TWOFOUR_UNROLL
  for (int t = 0; t < T; t++) {
    TWOFOUR_UNROLL
    for (int i = 0; i < 2 * kTablesVectors; i++) {
      const __m512i words = sums[t][i / 2][i % 2];
      add_whole(_mm512_castsi512_si256(words), by, first, whole + (2 * i * stride + t) * 16);
      add_whole(_mm512_extracti64x4_epi64(words, 1), by, first, whole + ((2 * i + 1) * stride + t) * 16);
    }
  }
}

// What a member of the team writes: tables of a slab, sums of 16 bits of a segment, and whole sums.
struct TablesScratch {
  TableSums of;
  int64_t panels, chunk, slab, tables, sums, whole;
  explicit TablesScratch(const Matmul& a)
      : of(a.quantization.x_most), panels(least(kTablesPanels, ceil_div(a.out_features, kTablesPanel))),
        chunk(least(kTablesChunk, of.per_word)),
        slab(4 * a.tokens > of.tokens
                 ? chunk : least(kTablesSlab / chunk, ceil_div(ceil_div(a.in_features, kTablesInputs), chunk)) * chunk),
        tables(slab * least(round_up(a.tokens, 2), of.tokens) * of.entry),
        sums(of.bytes ? static_cast<const BitsHead*>(a.weight)->bits * panels * of.tokens / 2 * kPairSums * 2 : 0),
        whole(panels * kTablesPanel * of.tokens * 4) {}
  int64_t bytes() const { return tables + sums + whole; }
};

struct TablesWork {
  const Matmul& a;
  const BitsWeight& w;
  const TablesScratch& scratch;
  const TokenFacts& facts;
  char* memory;
  int64_t groups, plane_bytes;

  uint8_t* tables(int64_t group) const { return reinterpret_cast<uint8_t*>(memory) + group * 2 * scratch.of.entry; }
  uint16_t* sums(int64_t plane, int64_t panel, int64_t pair) const {
    return reinterpret_cast<uint16_t*>(memory + scratch.tables) +
           ((plane * scratch.panels + panel) * (scratch.of.tokens / 2) + pair) * kPairSums;
  }
  int32_t* whole(int64_t panel) const {
    return reinterpret_cast<int32_t*>(memory + scratch.tables + scratch.sums) + panel * kTablesPanel * scratch.of.tokens;
  }
  const uint8_t* bytes(int64_t panel, int64_t plane, int64_t group) const {
    return reinterpret_cast<const uint8_t*>(w.panel(panel)) + plane * plane_bytes + group * kTablesPanel;
  }

  // The lookups of groups [begin, begin + count); `first`: of a segment.
  void slab(const uint8_t* codes, int64_t stride, int64_t tokens, int64_t panel, int64_t panels, int64_t begin,
            int64_t count, bool first) const {
    const TableSums& of = scratch.of;
    for (int64_t t = 0; t < tokens; t++)
      (of.bytes ? byte_tables : word_tables)(codes + t * stride + begin * kTablesInputs, count,
                                             tables(t / 2 * count) + t % 2 * of.entry, 2 * of.entry);
    for (int64_t p = 0; p < panels; p++)
      for (int64_t plane = 0; plane < w.head.bits; plane++)
        for (int64_t g = 0; g < count; g += scratch.chunk) {
          const uint8_t* from = bytes(panel + p, plane, begin + g);
          for (int64_t t = 0, some = least(scratch.chunk, count - g); t < tokens; t += 2) {
            const bool two = tokens - t > 1, ahead = tokens > 1 && t + 2 >= tokens;
            const uint8_t* table = tables(t / 2 * count + g);
            if (of.bytes) {
              (two ? table_tile<2> : table_tile<1>)(table, from, some, of.per_byte, first && g == 0, sums(plane, p, t / 2));
            } else {
              const auto run = ahead ? (two ? word_tile<2, true> : word_tile<1, true>) : two ? word_tile<2, false> : word_tile<1, false>;
              run(table, from, some, static_cast<int>(plane), of.tokens, begin + g == 0 && plane == 0, whole(p) + t * 16);
            }
          }
        }
  }
  void widen_panel(int64_t p, int64_t tokens, bool first) const {
    for (int64_t plane = 0; plane < w.head.bits; plane++)
      for (int64_t t = 0; t < tokens; t++)
        widen(sums(plane, p, t / 2) + t % 2 * (kPairSums / 2), static_cast<int>(plane), scratch.of.tokens,
              first && plane == 0, whole(p) + t * 16);
  }
  // Answers of up to of.tokens tokens, `first` of the call the first of them, and `panels` panels from `panel` on.
  void run(const uint8_t* codes, int64_t stride, int64_t first, int64_t tokens, int64_t panel, int64_t panels) const {
    const TableSums& of = scratch.of;
    const int64_t most = of.per_word / scratch.chunk * scratch.chunk, together = of.bytes ? least(scratch.slab, most) : scratch.slab;
    const int64_t segment = of.bytes ? most / together * together : groups;
    for (int64_t s = 0; s < groups; s += segment) {
      const int64_t stop = least(groups, s + segment);
      for (int64_t g = s; g < stop; g += together)
        slab(codes, stride, tokens, panel, panels, g, least(together, stop - g), g == s);
      for (int64_t p = 0; p < panels; p++) {
        const int64_t row = (panel + p) * kTablesPanel;
        if (stop == groups) fetch_answers(a, first, tokens, row, kTablesPanel);
        if (scratch.of.bytes) widen_panel(p, tokens, s == 0);
        if (stop == groups)
          finish_codes<WholeLanes>(a, w, whole(p), kTablesPanel / 16, scratch.of.tokens, facts, first, tokens, row);
      }
    }
  }
};

inline BitsPlan tables_plan(const Matmul& a) {
  return BitsPlan(a, padded_inputs(a.in_features), TableSums(a.quantization.x_most).tokens);
}

inline int64_t tables_workspace(const Matmul& a) {
  return round_up(tables_plan(a).bytes(), 64) + (a.threads > 1 ? a.threads : 1) * TablesScratch(a).bytes();
}

inline void tables_product(const Matmul& a) {
  if (a.tokens <= 0) return;
  const BitsWeight w(*twofour::bits_layout("bits_tables"), a.weight, a.out_features, a.in_features);
  const BitsPlan plan = tables_plan(a);
  const TokenFacts facts(a.workspace, a.tokens);
  const TablesScratch scratch(a);
  auto* memory = static_cast<char*>(a.workspace);
  auto* x = reinterpret_cast<uint8_t*>(memory + plan.facts);
  with_team(a.threads, [&](const Team& team) {
    const int64_t groups = ceil_div(a.in_features, kTablesInputs);
    const TablesWork work{a, w, scratch, facts, memory + round_up(plan.bytes(), 64) + team.me * scratch.bytes(), groups,
                          groups * kTablesPanel};
    for (int64_t pass = 0; pass < a.tokens; pass += plan.per_pass) {
      const int64_t count = least(plan.per_pass, a.tokens - pass), blocks = ceil_div(count, scratch.of.tokens);
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
          const int64_t from = b * scratch.of.tokens, some = least(scratch.of.tokens, count - from);
          work.run(x + from * plan.token_bytes, plan.token_bytes, pass + from, some, p, least(scratch.panels, p1 - p));
        }
    }
  });
}

}  // namespace
