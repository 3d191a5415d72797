// Fours: the 16 sums of 4 codes of a token that 4 bits of a weight can pick are looked up for 32 outputs by one vpshufb,
// whatever the bits of a code: tables.h for AVX2. Sums of lookups stay bytes as long as they fit, then 16 bits, then 32.
// Inputs of more than four bits are two halves, so that several lookups fit a byte. Internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "tokens.h"

namespace {

using twofour::kFoursInputs;
using twofour::kFoursPanel;

constexpr int64_t kFoursChunk = 192;   // groups whose bytes of a panel stay in L1 beside their tables of four rows
constexpr int64_t kFoursSlab = 1024;   // groups that rows have their tables of at once: no sum passes 16 bits
constexpr int64_t kFoursRows = 32;     // tokens, or halves of their codes, that have their tables at once
constexpr int64_t kFoursTogether = 32; // panels that are gone through with the tables of a slab
constexpr int64_t kFoursUnit = 64;     // bytes of a layout whose even ones are outputs 0 ... 31 and whose odd ones 32 ... 63
constexpr int64_t kFoursSumOfSlab = kFoursSlab * kFoursInputs * 15;
static_assert(kFoursSumOfSlab <= 65535);

// Half of the bits of a code: from bit `shift` on, up to `most`.
struct CodeHalf {
  int shift, most;
  int64_t per_byte() const { return 255 / (kFoursInputs * most); }  // lookups whose sum fits a byte
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

struct FourLookups {
  using Bytes = __m256i;
  static constexpr int bytes = 32, vectors = 1, rows = 4;

  static TWOFOUR_INLINE Bytes load(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }
  static TWOFOUR_INLINE void store(void* p, Bytes v) { _mm256_store_si256(static_cast<__m256i*>(p), v); }
  static TWOFOUR_INLINE Bytes all(__m128i v) { return _mm256_broadcastsi128_si256(v); }
  static TWOFOUR_INLINE Bytes find(Bytes table, Bytes index) { return _mm256_shuffle_epi8(table, index); }
  static TWOFOUR_INLINE Bytes add_bytes(Bytes a, Bytes b) { return _mm256_add_epi8(a, b); }
  static TWOFOUR_INLINE Bytes add_words(Bytes a, Bytes b) { return _mm256_add_epi16(a, b); }
  static TWOFOUR_INLINE Bytes odd(Bytes a) { return _mm256_srli_epi16(a, 8); }
};

struct FoursSpread {
  alignas(64) uint8_t code[kFoursInputs][64];
};
constexpr FoursSpread spread_of_fours() {
  FoursSpread s{};
  for (int j = 0; j < 64; j++)
    for (int i = 0; i < kFoursInputs; i++)
      s.code[i][j] = static_cast<uint8_t>(j % 16 >> i & 1 ? kFoursInputs * (j / 16) + i : 0x80);  // 0x80 gives zero
  return s;
}

// Tables of groups of 4 codes, 16 bytes each; of four groups at a time.
template <class S>
TWOFOUR_NOINLINE void four_tables(const uint8_t* codes, CodeHalf half, int64_t groups, uint8_t* to) {
  static constexpr FoursSpread spread = spread_of_fours();
  const __m128i most = _mm_set1_epi8(static_cast<char>(half.most)), shift = _mm_cvtsi32_si128(half.shift);
  for (int64_t g = 0; g < groups; g += 4, codes += 4 * kFoursInputs, to += 64) {
    const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const auto v = S::all(_mm_and_si128(_mm_srl_epi16(sixteen, shift), most));
    TWOFOUR_UNROLL
    for (int b = 0; b < 64; b += S::bytes) {
      auto sum = S::find(v, S::load(spread.code[0] + b));
      TWOFOUR_UNROLL
      for (int i = 1; i < kFoursInputs; i++) sum = S::add_bytes(sum, S::find(v, S::load(spread.code[i] + b)));
      S::store(to + b, sum);
    }
  }
}

// Adds the lookups of `groups` groups for R rows and some vectors of a panel to `sums`, [row][vector][words, odd bytes]. The
// even bytes are the sums of words less the odd ones: modulo 2^16 no mask.
template <class S, int R>
TWOFOUR_NOINLINE void four_tile(const uint8_t* tables, int64_t stride, const uint8_t* w, int64_t groups, int64_t per_byte,
                                bool first, uint16_t* sums) {
  using Bytes = typename S::Bytes;
  Bytes words[R][S::vectors], odds[R][S::vectors];
  TWOFOUR_UNROLL
  for (int r = 0; r < R; r++) {
    TWOFOUR_UNROLL
    for (int v = 0; v < S::vectors; v++) {
      const uint16_t* from = sums + (r * S::vectors + v) * S::bytes;
      words[r][v] = first ? Bytes{} : S::load(from);
      odds[r][v] = first ? Bytes{} : S::load(from + S::bytes / 2);
    }
  }
  for (int64_t g = 0; g < groups;) {
    const int64_t stop = least(groups, g + per_byte);
    Bytes bytes[R][S::vectors];
    const auto look = [&](bool begin) {
      Bytes index[S::vectors];
      TWOFOUR_UNROLL
      for (int v = 0; v < S::vectors; v++) {
        index[v] = S::load(w + v * S::bytes);
        asm("" : "+v"(index[v]));  // else gcc loads it again for every row
      }
      TWOFOUR_UNROLL
      for (int r = 0; r < R; r++) {
        const Bytes table = S::all(_mm_load_si128(reinterpret_cast<const __m128i*>(tables + r * stride)));
        TWOFOUR_UNROLL
        for (int v = 0; v < S::vectors; v++) {
          const Bytes found = S::find(table, index[v]);
          bytes[r][v] = begin ? found : S::add_bytes(bytes[r][v], found);
        }
      }
      w += kFoursPanel;
      tables += 16;
      g++;
    };
    look(true);
    while (g < stop) look(false);
    TWOFOUR_UNROLL
    for (int r = 0; r < R; r++) {
      TWOFOUR_UNROLL
      for (int v = 0; v < S::vectors; v++) {
        words[r][v] = S::add_words(words[r][v], bytes[r][v]);
        odds[r][v] = S::add_words(odds[r][v], S::odd(bytes[r][v]));
      }
    }
  }
  TWOFOUR_UNROLL
  for (int r = 0; r < R; r++) {
    TWOFOUR_UNROLL
    for (int v = 0; v < S::vectors; v++) {
      uint16_t* to = sums + (r * S::vectors + v) * S::bytes;
      S::store(to, words[r][v]);
      S::store(to + S::bytes / 2, odds[r][v]);
    }
  }
}

// Adds `count` numbers of 16 bits, shifted, to whole[vector of V][stride][V::width], or puts them there.
template <class V>
TWOFOUR_INLINE void widen_words(const uint16_t* words, const uint16_t* less, int64_t count, int shift, bool first,
                                int64_t stride, int32_t* whole) {
  typedef uint16_t N __attribute__((vector_size(V::width * 2)));
  for (int64_t i = 0; i < count; i += V::width, whole += stride * V::width) {
    N v, odd;
    std::memcpy(&v, words + i, sizeof v);
    if (less != nullptr) {
      std::memcpy(&odd, less + i, sizeof odd);
      v -= odd << 8;
    }
    typename V::U wide = __builtin_convertvector(v, typename V::U) << shift, before;
    if (!first) {
      std::memcpy(&before, whole, sizeof before);
      wide += before;
    }
    std::memcpy(whole, &wide, sizeof wide);
  }
}

// What a member of the team writes: tables of a slab, its sums of 16 bits of a panel, and whole sums.
struct FoursScratch {
  int64_t halves, tokens, groups, slabs, together, row, tables, sums, whole;
  explicit FoursScratch(const Matmul& a)
      : halves(CodeHalves(a.quantization.x_most).count), tokens(kFoursRows / halves),
        groups(ceil_div(a.in_features, kFoursInputs)), slabs(ceil_div(groups, kFoursSlab)),
        together(slabs > 1 ? least(kFoursTogether, ceil_div(a.out_features, kFoursPanel)) : 1),
        row(round_up(least(groups, kFoursSlab), 4) * 16 + 64),  // so that rows stand in different sets of L1
        tables(kFoursRows * row), sums(static_cast<const BitsHead*>(a.weight)->bits * kFoursRows * kFoursPanel * 2),
        whole(together * kFoursPanel * tokens * 4) {}
  int64_t bytes() const { return tables + sums + whole; }
};

template <class S>
struct FoursWork {
  using V = WholeLanes;
  static constexpr int64_t tile = S::bytes * S::vectors;  // bytes of a group that a tile takes
  const Matmul& a;
  const BitsWeight& w;
  const CodeHalves& halves;
  const FoursScratch& scratch;
  const TokenFacts& facts;
  char* memory;

  uint8_t* tables(int64_t row) const { return reinterpret_cast<uint8_t*>(memory) + row * scratch.row; }
  uint16_t* sums(int64_t plane, int64_t column, int64_t row) const {
    return reinterpret_cast<uint16_t*>(memory + scratch.tables) +
           ((plane * (kFoursPanel / tile) + column) * kFoursRows + row) * tile;
  }
  int32_t* whole(int64_t place) const {
    return reinterpret_cast<int32_t*>(memory + scratch.tables + scratch.sums) + place * kFoursPanel * scratch.tokens;
  }

  // Lookups of groups [begin, begin + count) of a panel, of which `done` of the slab's were made before, for all rows.
  void chunk(int64_t p, int64_t begin, int64_t count, int64_t done, int64_t rows) const {
    const int64_t plane_bytes = scratch.groups * kFoursPanel;
    for (int64_t plane = 0; plane < w.head.bits; plane++)
      for (int64_t column = 0; column < kFoursPanel / tile; column++) {
        const auto* bytes = reinterpret_cast<const uint8_t*>(w.panel(p)) + plane * plane_bytes + begin * kFoursPanel + column * tile;
        for (int64_t r = 0; r < rows;) {
          const int64_t some = rows - r >= S::rows ? S::rows : rows - r >= 2 ? 2 : 1;
          const auto run = some == S::rows ? four_tile<S, S::rows> : some == 2 ? four_tile<S, 2> : four_tile<S, 1>;
          run(tables(r) + done * 16, scratch.row, bytes, count, halves.half[0].per_byte(), done == 0,
              sums(plane, column, r));
          r += some;
        }
      }
  }
  void widen(int64_t rows, bool first, int32_t* to) const {
    for (int64_t plane = 0; plane < w.head.bits; plane++)
      for (int64_t column = 0; column < kFoursPanel / tile; column++)
        for (int64_t r = 0; r < rows; r++)
          for (int64_t v = 0; v < S::vectors; v++) {
            const uint16_t* words = sums(plane, column, r) + v * S::bytes;
            const int64_t at = column * tile + v * S::bytes, even = at / kFoursUnit * kFoursUnit + at % kFoursUnit / 2;
            const int shift = static_cast<int>(plane) + halves.half[r % halves.count].shift;
            const bool anew = first && plane == 0 && r % halves.count == 0;
            int32_t* from = to + (even / V::width * scratch.tokens + r / halves.count) * V::width;
            widen_words<V>(words, words + S::bytes / 2, S::bytes / 2, shift, anew, scratch.tokens, from);
            widen_words<V>(words + S::bytes / 2, nullptr, S::bytes / 2, shift, anew, scratch.tokens,
                           from + kFoursUnit / 2 * scratch.tokens);
          }
  }
  // Answers of up to scratch.tokens tokens, whose codes are `stride` apart, and panels [begin, end).
  void run(const uint8_t* codes, int64_t stride, int64_t first, int64_t tokens, int64_t begin, int64_t end) const {
    const int64_t rows = tokens * halves.count;
    for (int64_t panel = begin; panel < end; panel += scratch.slabs > 1 ? scratch.together : end - begin)
      for (int64_t slab = 0; slab < scratch.groups; slab += kFoursSlab) {
        const int64_t groups = least(kFoursSlab, scratch.groups - slab);
        for (int64_t r = 0; r < rows; r++)
          four_tables<S>(codes + r / halves.count * stride + slab * kFoursInputs, halves.half[r % halves.count], groups, tables(r));
        const int64_t stop = scratch.slabs > 1 ? least(end, panel + scratch.together) : end;
        for (int64_t p = panel; p < stop; p++) {
          for (int64_t g = 0; g < groups; g += kFoursChunk) chunk(p, slab + g, least(kFoursChunk, groups - g), g, rows);
          int32_t* to = whole(scratch.slabs > 1 ? p - panel : 0);
          widen(rows, slab == 0, to);
          if (slab + groups == scratch.groups)
            finish_codes<V>(a, w, to, kFoursPanel / V::width, scratch.tokens, facts, first, tokens, p * kFoursPanel);
        }
      }
  }
};

inline BitsPlan fours_plan(const Matmul& a) { return BitsPlan(a, padded_inputs(a.in_features), kFoursRows); }

inline int64_t fours_workspace(const Matmul& a) {
  return round_up(fours_plan(a).bytes(), 64) + (a.threads > 1 ? a.threads : 1) * FoursScratch(a).bytes();
}

template <class S>
void fours_product(const Matmul& a) {
  if (a.tokens <= 0) return;
  const BitsWeight w(*twofour::bits_layout("bits_fours"), a.weight, a.out_features, a.in_features);
  const BitsPlan plan = fours_plan(a);
  const TokenFacts facts(a.workspace, a.tokens);
  const CodeHalves halves(a.quantization.x_most);
  const FoursScratch scratch(a);
  auto* memory = static_cast<char*>(a.workspace);
  auto* x = reinterpret_cast<uint8_t*>(memory + plan.facts);
  with_team(a.threads, [&](const Team& team) {
    const FoursWork<S> work{a, w, halves, scratch, facts, memory + round_up(plan.bytes(), 64) + team.me * scratch.bytes()};
    for (int64_t pass = 0; pass < a.tokens; pass += plan.per_pass) {
      const int64_t count = least(plan.per_pass, a.tokens - pass), blocks = ceil_div(count, scratch.tokens);
      if (pass > 0) team.barrier();  // the last tokens are still being read
      for (int64_t t = team.me; t < count; t += team.size)
        token_codes<WholeLanes>(a, pass + t, x + t * plan.token_bytes, plan.padded, facts);
      team.barrier();
      // Members share tokens where there are enough, since each makes tables of its own, else panels.
      int64_t b0 = 0, b1 = blocks, p0 = 0, p1 = w.panels;
      if (blocks >= team.size) team.share(blocks, 1, &b0, &b1);
      else team.share(w.panels, 1, &p0, &p1);
      for (int64_t b = b0; b < b1; b++) {
        const int64_t from = b * scratch.tokens;
        work.run(x + from * plan.token_bytes, plan.token_bytes, pass + from, least(scratch.tokens, count - from), p0, p1);
      }
    }
  });
}

}  // namespace
