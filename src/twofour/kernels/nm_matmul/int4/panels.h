// Prompts on the layout "int4_rows": vectors hold tokens, and a dword two inputs of one, so that the two kept weights of a group
// are one dot of words and one address.
//
// A panel has a row for each of the six pairs of inputs that a group of four can keep, as ../f32/few_panels.h has it:
//
//     row 7 g + code:   x_i x_j of t0 | x_i x_j of t1 | ...      i, j of the group g, code = i | j << 2
//
// Inputs are whole numbers of 16 bits as in ../../int4/fixed_point.h, but whole: no planes. Weights of a unit are opened to
// words, up to 128 inputs at a time, four groups of a row side by side: a broadcast of 16 bytes, and a shuffle for each group, serve all
// tokens. Internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/int4/fixed_point.h"
#include "kernels/layouts/int4.h"
#include "kernels/whole_lanes.h"
#include "native/team.h"

namespace {

using twofour::Int4Unit;
using twofour::kInt4BlockBytes;
using twofour::kInt4Half;
using twofour::kInt4HalfBytes;
using twofour::kInt4Rows;
using twofour::kInt4Tile;

// Vectors of pairs of words.
struct WordLanes : WholeLanes {
#if defined(TWOFOUR_SET_avx512)
  // The numbers of two vectors as words, in order.
  static TWOFOUR_INLINE ints words(ints a, ints b) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_packs_epi32(a, b));
  }
  static TWOFOUR_INLINE ints shuffle_bytes(ints v, __m128i of) { return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(of)); }
  static TWOFOUR_INLINE ints words_above(ints v) { return _mm512_srai_epi16(v, 8); }
  static TWOFOUR_INLINE ints broadcast_quad(const char* p) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  }
  template <int pair>
  static TWOFOUR_INLINE ints broadcast_pair(ints quad) {
    return _mm512_shuffle_epi32(quad, static_cast<_MM_PERM_ENUM>(pair * 0x55));
  }
#else
  static TWOFOUR_INLINE ints words(ints a, ints b) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8); }
  static TWOFOUR_INLINE ints shuffle_bytes(ints v, __m128i of) { return _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(of)); }
  static TWOFOUR_INLINE ints words_above(ints v) { return _mm256_srai_epi16(v, 8); }
  static TWOFOUR_INLINE ints broadcast_quad(const char* p) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  }
  template <int pair>
  static TWOFOUR_INLINE ints broadcast_pair(ints quad) {
    return _mm256_shuffle_epi32(quad, pair * 0x55);
  }
#endif
  // sum + the products of both words of each dword.
  static TWOFOUR_INLINE ints dot_words(ints sum, ints w, const char* x) {
    const ints& inputs = *reinterpret_cast<const ints*>(x);
#if defined(TWOFOUR_SET_avx512_vnni)
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(w), "m"(inputs));
    return sum;
#elif defined(TWOFOUR_SET_avx_vnni)
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(w), "m"(inputs));
    return sum;
#elif defined(TWOFOUR_SET_avx512)
    return _mm512_add_epi32(sum, _mm512_madd_epi16(w, inputs));
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(w, inputs));
#endif
  }
};

constexpr int64_t kPromptVector = WordLanes::width;       // tokens
constexpr int64_t kPromptPiece = 2 * kPromptVector;       // that share a pass over the rows
constexpr int64_t kPromptPieces = 64 / kPromptPiece;      // that share the opened weights
constexpr int64_t kPromptUnits = 8;                       // whose sums wait in L2 while a span passes
constexpr int64_t kPromptSpan = 4;                        // blocks of 32 inputs, at most: a panel of 28 KB, or 14
constexpr int64_t kPromptRows = 7 * (kInt4Tile / 4);      // rows of a panel that a block adds
constexpr int64_t kPromptBytes = kPromptVector * 4;       // of a vector
constexpr int64_t kQuadBytes = kInt4Half * 16;            // four groups of each row of a half, opened
constexpr int kQuads = kInt4Tile / 16;                    // of a block

// log2 of the bytes of a panel's row.
constexpr int prompt_shift(int vectors) { return (kPromptVector == 16 ? 5 : 4) + vectors; }

// Where things are in the workspace: pieces of tokens that all threads read, then sums and opened weights of each thread.
struct PromptPlan {
  int64_t tiles, pieces, panel_bytes, sums_bytes, thread_bytes;
  static constexpr int64_t kScales = kPromptPiece * 4, kOpened = 2 * kPromptSpan * kQuads * kQuadBytes;

  explicit PromptPlan(const Matmul& a)
      : tiles(ceil_div(a.in_features, kInt4Tile)),
        pieces(least(kPromptPieces, ceil_div(a.tokens > 0 ? a.tokens : 1, kPromptPiece))),
        panel_bytes(kScales + ((kPromptRows * tiles + 16) << prompt_shift(2))),
        sums_bytes(kPromptUnits * kInt4Rows * kPromptPiece * 4),
        thread_bytes(pieces * sums_bytes + kOpened + kInt4Rows * 4) {}
  int64_t bytes(const Matmul& a) const { return pieces * panel_bytes + (a.threads > 1 ? a.threads : 1) * thread_bytes; }
};

// Two vectors of inputs from k on of a token as pairs of words; zero where there is no such token.
inline Lanes::reg word_pairs(const Matmul& a, int64_t token, int64_t k, const float* scale) {
  if (token >= a.tokens) return Lanes::zero();
  const auto inverse = Lanes::all(1.0f / *scale);
  return (Lanes::reg)WordLanes::words(round_x<WholeLanes>(a, token, k, inverse),
                                      round_x<WholeLanes>(a, token, k + kPromptVector, inverse));
}

// The groups of 2 * kPromptVector inputs from k on of a vector's tokens, from `token` on; their scales are there.
inline void pack_prompt(const Matmul& a, int64_t token, int64_t k, const float* scales, char* panel, int64_t stride) {
  using U = Lanes::U;
  Lanes::reg pairs[kPromptVector];
  for (int64_t t = 0; t < kPromptVector; t++) pairs[t] = word_pairs(a, token + t, k, scales + t);
  Lanes::transpose(pairs);
  for (int64_t g = 0; g < kPromptVector / 2; g++) {
    const U first = (U)pairs[2 * g], second = (U)pairs[2 * g + 1], low = first & 0xffffu, high = second & 0xffff0000u;
    char* rows = panel + 7 * (k / 4 + g) * stride;
    const auto store = [&](int i, int j, U v) TWOFOUR_INLINED {
      Lanes::store_aligned(reinterpret_cast<float*>(rows + (i | j << 2) * stride), (Lanes::reg)v);
    };
    store(0, 1, first);
    store(0, 2, low | second << 16);
    store(0, 3, low | high);
    store(1, 2, first >> 16 | second << 16);
    store(1, 3, first >> 16 | high);
    store(2, 3, second);
  }
}

// Blocks [b, b + count) of a unit, opened: [half][block][quad of groups][vector of rows][row % 4][row / 4][4 groups] pairs of
// words less their zero points, and the scales of the group that they are of.
struct OpenedSpan {
  const Int4Unit& at;
  const uint8_t* unit;
  int64_t first, count;
  char* words;
  float* scales;

  template <bool Zeros>
  TWOFOUR_INLINE void open() const {
    const int64_t group = first / at.group_tiles;
    for (int64_t lane = 0; lane < kInt4Rows; lane += kPromptVector) {
      const int64_t of_group = group * kInt4Rows + lane, h = lane / kInt4Half, in_half = lane % kInt4Half;
      Lanes::store_unaligned(scales + lane, load_scales<Lanes>(unit + at.scales + of_group * 2));
      const auto zero = Zeros ? load_zeros<WholeLanes>(unit + at.zeros + of_group)
                              : (WholeLanes::ints)(Lanes::U{} + 0x01010101u * twofour::kInt4Offset);
      for (int64_t b = 0; b < count; b++)
        for (int line = 0; line < kQuads; line++)
          open_line(half(b, h) + 64 + line * 64 + in_half * 4, zero, quad(h, b, line) + in_half * 16);
    }
  }
  const uint8_t* half(int64_t b, int64_t h) const {
    return unit + at.blocks + (first + b) * kInt4BlockBytes + h * kInt4HalfBytes;
  }
  char* quad(int64_t h, int64_t b, int line) const { return words + ((h * kPromptSpan + b) * kQuads + line) * kQuadBytes; }

 private:
  // Two steps of a vector of rows, the four groups of a row side by side.
  static TWOFOUR_INLINE void open_line(const uint8_t* line, WholeLanes::ints zero, char* to) {
    typedef uint8_t Bytes __attribute__((vector_size(4 * WholeLanes::width)));
    const auto both = (Lanes::U)WholeLanes::load_ints(line);
    // Bytes 0 and 1 of a dword, and 2 and 3, to the upper bytes of words.
    const __m128i front = _mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13);
    const __m128i back = _mm_setr_epi8(-1, 2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15);
    Lanes::reg groups[4];
    TWOFOUR_UNROLL
    for (int s = 0; s < 2; s++) {
      const auto values = (WholeLanes::ints)((Bytes)((s == 0 ? both : both >> 4) & 0x0f0f0f0fu) - (Bytes)zero);
      groups[2 * s] = (Lanes::reg)WordLanes::words_above(WordLanes::shuffle_bytes(values, front));
      groups[2 * s + 1] = (Lanes::reg)WordLanes::words_above(WordLanes::shuffle_bytes(values, back));
    }
    Lanes::transpose_quarters(groups);
    for (int i = 0; i < 4; i++) Lanes::store_aligned(reinterpret_cast<float*>(to + i * kPromptBytes), groups[i]);
  }
};

// Group `group` of a block of four rows against U vectors of tokens.
template <int U, int group>
TWOFOUR_INLINE void add_prompt_group(const char* x, const uint32_t (&meta)[4], const WholeLanes::ints (&quads)[4],
                                     WholeLanes::ints (&sums)[4][U]) {
  constexpr int shift = prompt_shift(U), turn = (shift - 4 * group) & 31;
  TWOFOUR_UNROLL
  for (int r = 0; r < 4; r++) {
    const uint32_t turned = turn == 0 ? meta[r] : meta[r] << turn | meta[r] >> ((32 - turn) & 31);
    const char* row = x + (turned & (uint32_t{15} << shift)) + ((7 * group) << shift);
    const auto pair = WordLanes::broadcast_pair<group % 4>(quads[r]);
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) sums[r][u] = WordLanes::dot_words(sums[r][u], pair, row + u * kPromptBytes);
  }
}

// Quad `line` of a block, which stands at `words`.
template <int U, int line>
TWOFOUR_INLINE void add_prompt_quad(const char* words, const char* x, const uint32_t (&meta)[4],
                                    WholeLanes::ints (&sums)[4][U]) {
  WholeLanes::ints quads[4];
  TWOFOUR_UNROLL
  for (int r = 0; r < 4; r++) quads[r] = WordLanes::broadcast_quad(words + r * kPromptBytes);
  add_prompt_group<U, 4 * line>(x, meta, quads, sums);
  add_prompt_group<U, 4 * line + 1>(x, meta, quads, sums);
  add_prompt_group<U, 4 * line + 2>(x, meta, quads, sums);
  add_prompt_group<U, 4 * line + 3>(x, meta, quads, sums);
}

// Rows [row, row + 4) of a unit and an opened span; `begins`: the first span of all.
template <int U>
TWOFOUR_INLINE void add_prompt_rows(const OpenedSpan& span, int64_t row, const char* x, bool begins, float* to) {
  const int64_t h = row / kInt4Half, in_half = row % kInt4Half, vector = in_half / kPromptVector * kPromptVector;
  const int64_t at_words = vector * 16 + (in_half - vector) * 4;
  WholeLanes::ints sums[4][U] = {};
  for (int64_t b = 0; b < span.count; b++, x += kPromptRows << prompt_shift(U)) {
    uint32_t meta[4];
    std::memcpy(meta, span.half(b, h) + in_half * 4, sizeof meta);
    add_prompt_quad<U, 0>(span.quad(h, b, 0) + at_words, x, meta, sums);
    add_prompt_quad<U, 1>(span.quad(h, b, 1) + at_words, x, meta, sums);
  }
  TWOFOUR_UNROLL
  for (int r = 0; r < 4; r++) {
    const auto scale = Lanes::all(span.scales[row + r]);
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) {
      float* at = to + (r * U + u) * kPromptVector;
      const auto real = WholeLanes::to_real(sums[r][u]) * scale;
      Lanes::store_aligned(at, begins ? real : real + Lanes::load_aligned(at));
    }
  }
}

// An opened span of a unit; sums are U vectors a row.
template <int U>
TWOFOUR_NOINLINE void add_prompt_span(const OpenedSpan& span, const char* x, bool begins, float* to) {
  for (int64_t row = 0; row < kInt4Rows; row += 4)
    add_prompt_rows<U>(span, row, x, begins, to + row * U * kPromptVector);
}

// A vector's tokens of as many rows from `row` on: sums of rows `step` floats apart.
inline void store_prompt(const Matmul& a, int64_t token, int64_t row, const float* scales, const float* sums, int64_t step) {
  if (row >= a.out_features) return;
  Lanes::reg tokens[kPromptVector];
  for (int64_t r = 0; r < kPromptVector; r++) tokens[r] = Lanes::load_aligned(sums + r * step);
  Lanes::transpose(tokens);
  for (int64_t t = 0; t < least(kPromptVector, a.tokens - token); t++)
    finish<Lanes>(a, token + t, row, tokens[t] * Lanes::all(scales[t]));
}

// Pieces of tokens from `first` on, and what one thread has of its own.
struct Prompt {
  const Matmul& a;
  const PromptPlan& plan;
  int64_t first, count;
  char *pieces, *own;

  int64_t token(int64_t piece) const { return first + piece * kPromptPiece; }
  int vectors(int64_t piece) const { return a.tokens - token(piece) > kPromptVector ? 2 : 1; }
  float* scales(int64_t piece) const { return reinterpret_cast<float*>(pieces + piece * plan.panel_bytes); }
  char* panel(int64_t piece) const { return pieces + piece * plan.panel_bytes + PromptPlan::kScales; }
  float* sums(int64_t piece) const { return reinterpret_cast<float*>(own + piece * plan.sums_bytes); }

  void scale(const Team& team) const {
    for (int64_t t = team.me; t < least(count * kPromptPiece, a.tokens - first); t += team.size)
      scales(t / kPromptPiece)[t % kPromptPiece] = scale_of<Lanes>(a, first + t, kSignedLargest);
  }
  void pack(int64_t begin, int64_t end) const {
    for (int64_t p = 0; p < count; p++)
      for (int64_t tile = begin; tile < end; tile++)
        for (int u = 0; u < vectors(p); u++)
          for (int64_t k = tile * kInt4Tile; k < (tile + 1) * kInt4Tile; k += 2 * kPromptVector)
            pack_prompt(a, token(p) + u * kPromptVector, k, scales(p) + u * kPromptVector, panel(p) + u * kPromptBytes,
                        int64_t{1} << prompt_shift(vectors(p)));
  }
  // Units [u0, u1), at most kPromptUnits.
  template <bool Zeros>
  void multiply(int64_t u0, int64_t u1) const {
    const Int4Unit at(a.in_features, a.group, Zeros, kInt4BlockBytes);
    char* words = own + plan.pieces * plan.sums_bytes;
    auto* row_scales = reinterpret_cast<float*>(words + PromptPlan::kOpened);
    const int64_t together = least(kPromptSpan, at.group_tiles);  // a span is of one group
    for (int64_t b = 0; b < at.tiles; b += together)
      for (int64_t u = u0; u < u1; u++) {
        const uint8_t* unit = static_cast<const uint8_t*>(a.weight) + u * at.bytes;
        const OpenedSpan span{at, unit, b, least(together, at.tiles - b), words, row_scales};
        for (int64_t line = 0; line < together * kInt4BlockBytes; line += 64)  // of the next unit, or the next span
          __builtin_prefetch(unit + at.blocks + b * kInt4BlockBytes + line + at.bytes);
        span.open<Zeros>();
        for (int64_t p = 0; p < count; p++) {
          const int used = vectors(p);
          const char* x = panel(p) + ((b * kPromptRows) << prompt_shift(used));
          float* to = sums(p) + (u - u0) * kInt4Rows * used * kPromptVector;
          if (used == 2) add_prompt_span<2>(span, x, b == 0, to);
          else add_prompt_span<1>(span, x, b == 0, to);
        }
      }
    for (int64_t p = 0; p < count; p++) store(p, u0, u1);
  }
  void store(int64_t piece, int64_t u0, int64_t u1) const {
    const int64_t used = vectors(piece), step = used * kPromptVector;
    for (int64_t row = 0; row < (u1 - u0) * kInt4Rows; row += kPromptVector)
      for (int64_t u = 0; u < used; u++)
        store_prompt(a, token(piece) + u * kPromptVector, u0 * kInt4Rows + row, scales(piece) + u * kPromptVector,
                     sums(piece) + row * step + u * kPromptVector, step);
  }
};

// The members scale and pack the tokens together, then share the units.
inline void prompt_product(const Matmul& a) {
  const PromptPlan plan(a);
  with_team(a.threads, [&](const Team& team) {
    auto* pieces = static_cast<char*>(a.workspace);
    char* own = pieces + plan.pieces * plan.panel_bytes + team.me * plan.thread_bytes;
    for (int64_t first = 0; first < a.tokens; first += plan.pieces * kPromptPiece) {
      const Prompt prompt{a, plan, first, least(plan.pieces, ceil_div(a.tokens - first, kPromptPiece)), pieces, own};
      if (first > 0) team.barrier();  // the pieces before are still being read
      prompt.scale(team);
      team.barrier();
      int64_t begin, end;
      team.share(plan.tiles, 1, &begin, &end);
      prompt.pack(begin, end);
      team.barrier();
      team.share(ceil_div(a.out_features, kInt4Rows), 1, &begin, &end);
      for (int64_t u = begin; u < end; u += kPromptUnits)
        a.zeros ? prompt.multiply<true>(u, least(u + kPromptUnits, end))
                : prompt.multiply<false>(u, least(u + kPromptUnits, end));
    }
  });
}

}  // namespace
