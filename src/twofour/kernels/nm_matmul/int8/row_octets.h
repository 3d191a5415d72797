// Design C in int8: vectors hold output rows, the activations of eight inputs are permuted in the register.
//
// The eight inputs of two groups are broadcast to all lanes. A row's lane holds four kept values and four indices, and
// one permute brings the four activations beside them: a dot product of four bytes does the work of eight inputs.
// Metadata is a dword per row and 32 inputs: the next index of each byte is a shift.
// Included once per instruction-set file, with V the vector type of that file; everything has internal linkage.
#pragma once

#include <cstdint>

#include "kernels/byte_windows.h"
#include "kernels/octet_dots.h"
#include "kernels/row_shape.h"
#include "kernels/whole_outputs.h"
#include "native/compiler.h"
#include "native/team.h"
#include "native/integers.h"

namespace {

using FetchOctets = FetchNearAndFar<2048>;  // as f32/row_blocks.h
constexpr int64_t kOctetPass = 512 * 1024;  // bytes of activations per pass over the weights: half of a small L2
constexpr int64_t kOctetWeights = 1024 * 1024;    // weights up to this size are read once per piece of tokens instead

// Tokens of a piece, at most. Of more than kRowTokens the halves of a unit go one after the other: 16 sums of one vector of rows
// take a load of weights for 16 pairs, and their indices are masked once for these.
template <class V>
constexpr int kOctetTokens = V::width == 16 ? 16 : kRowTokens<V>;

// Tiles of a piece of more tokens that both halves of a unit are multiplied by before the next ones: an L1 of 32 KB holds them.
constexpr int64_t kOctetBlock = 24;

inline int64_t size_of(Type type) { return type == Type::f32 ? 4 : type == Type::bf16 ? 2 : 1; }

// The answers of 32 rows are two lines of each token, far apart, and so is what is added to them: without this, many tokens
// wait for them (512 tokens of 3072 x 768: 614 against 691 GOP/s).
TWOFOUR_INLINE void expect_answer(const Matmul& a, int64_t token, int64_t row, int64_t size, bool other) {
  const char* y = static_cast<const char*>(a.y) + (token * a.y_stride + row) * size;
  for (int64_t at = 0; at < 2 * kRowUnit * size; at += 64) __builtin_prefetch(y + at, 1);
  if (!other) return;
  const int64_t each = a.y_type == Type::bf16 ? 2 : 4;
  const char* with = static_cast<const char*>(a.epilogue.other) + (token * a.epilogue.other_stride + row) * each;
  for (int64_t at = 0; at < 2 * kRowUnit * each; at += 64) __builtin_prefetch(with + at);
}

// Lines of the next unit that a piece of more than kRowTokens tokens asks for, so many with each tile, as it does for the places
// of a token's answers with each of the first ones: all at once they fill the queue of misses, and the product waits.
struct Ahead {
  const uint8_t *line, *end;
  int64_t each;
};

// Scales and sums of the rows stand in front of the units.
inline WholeRows octet_head(const Matmul& a) {
  const auto* head = static_cast<const uint8_t*>(a.weight);
  return {reinterpret_cast<const float*>(head),
          reinterpret_cast<const int32_t*>(head + twofour::int8_padded_rows(a.out_features) * 4)};
}

inline int64_t octet_tiles(const Matmul& a) { return (a.in_features + kRowTile - 1) / kRowTile; }

// Sums of 16 * Halves rows and T tokens, [vector][token][V::width]: `more` of them, where a piece is of more than kRowTokens
// tokens. Calls between() after each tile.
template <class V, class Fetch, int T, int Halves, class Between>
TWOFOUR_INLINE void octet_sums(int64_t tiles, const uint8_t* unit, const uint8_t* x, int32_t* sums, bool more,
                               const Between& between) {
  constexpr int strips = Fetch::in_order ? Halves : 1;  // of rows that are read one after the other
  constexpr int vectors = Halves / strips * (kRowUnit / V::width);
  constexpr int Sets = octet_sets<V>(strips * vectors * T);
  typename V::ints acc[strips][Sets][vectors][T] = {};
  if constexpr (T > kRowTokens<V>)
    if (more) {
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) acc[0][0][0][t] = V::load_ints(reinterpret_cast<const uint8_t*>(sums + t * V::width));
    }
  for (int64_t k = tiles; k > 0; k--, unit += 2 * kOctetHalfBytes, x += kRowTile * T) {
    TWOFOUR_UNROLL
    for (int s = 0; s < strips; s++)
      add_octets<V, T, Halves / strips, Sets>(
          unit + s * kOctetHalfBytes, [&](int t, int o) TWOFOUR_INLINED { return x + (o * T + t) * 8; },
          [](const uint8_t* line) TWOFOUR_INLINED { if constexpr (T <= kRowTokens<V>) Fetch::template fetch<V>(line, 0); },
          acc[s]);
    between();
  }
  TWOFOUR_UNROLL
  for (int i = 0; i < strips * vectors; i++) {
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      typename V::ints sum = acc[i / vectors][0][i % vectors][t];
      TWOFOUR_UNROLL
      for (int s = 1; s < Sets; s++) sum = V::add(sum, acc[i / vectors][s][i % vectors][t]);
      V::store_ints(sums + (i * T + t) * V::width, sum);
    }
  }
}

// All rows of one unit of 32 for T tokens. Both halves leave together: what is made of the call for that is made once.
template <class V, class Fetch, int T>
TWOFOUR_NOINLINE void octet_rows(const WindowCall& a, const uint8_t* unit, const uint8_t* x, const Range* ranges,
                                 int64_t first, int64_t row, Ahead ahead) {
  constexpr bool many = T > kRowTokens<V>;
  constexpr int Halves = many ? 1 : Fetch::in_order ? 2 : kRowHalves<V>;
  alignas(64) int32_t sums[2 * kRowUnit * T];
  const int64_t size = size_of(a.y_type), tiles = octet_tiles(a);
  const int64_t block = many ? ceil_div(tiles, ceil_div(tiles, kOctetBlock)) : tiles;
  const bool other = many && a.epilogue.combine != Combine::none;
  int64_t token = first;
  const auto between = [&]() TWOFOUR_INLINED {
    if constexpr (many) {
      if (token < first + T) expect_answer(a, token++, row, size, other);
      for (int64_t n = ahead.each; n > 0 && ahead.line < ahead.end; n--, ahead.line += 64) __builtin_prefetch(ahead.line, 0, 2);
    }
  };
  while ((!many || 2 * tiles < T) && token < first + T) expect_answer(a, token++, row, size, other);
  for (int64_t k = 0; k < tiles; k += block)
    for (int h = 0; h < 2; h += Halves)
      octet_sums<V, Fetch, T, Halves>(least(block, tiles - k), unit + (2 * k + h) * kOctetHalfBytes, x + k * kRowTile * T,
                                      sums + h * kRowUnit * T, k > 0, between);
  finish_windows<V>(a, octet_head(a), sums, 2 * kRowUnit / V::width, T, ranges, first, T, row, a.out_features);
}

// The same for `tokens` <= T.
template <class V, class Fetch, int T>
void octet_rows_of(int64_t tokens, const WindowCall& a, const uint8_t* unit, const uint8_t* x, const Range* ranges,
                   int64_t first, int64_t row, Ahead ahead) {
  if (tokens == T) return octet_rows<V, Fetch, T>(a, unit, x, ranges, first, row, ahead);
  if constexpr (T > 1) octet_rows_of<V, Fetch, T - 1>(tokens, a, unit, x, ranges, first, row, ahead);
}

// Passes of tokens whose activations fit kOctetPass; each pass in pieces of nearly equal size, at most kOctetTokens<V>.
template <class V>
struct OctetPlan {
  int64_t tokens, row_bytes, per_pass;

  explicit OctetPlan(const Matmul& a) : tokens(a.tokens), row_bytes(octet_tiles(a) * kRowTile) {
    const int64_t fit = kOctetPass / row_bytes / kOctetTokens<V> * kOctetTokens<V>;
    per_pass = least(fit > 0 ? fit : kOctetTokens<V>, tokens);
  }
  int64_t range_bytes() const { return (tokens * static_cast<int64_t>(sizeof(Range)) + 63) / 64 * 64; }
  int64_t bytes() const { return range_bytes() + per_pass * row_bytes; }
};

// Piece p of `pieces` that share `count` tokens: its first token and, by the next piece's, its size.
inline int64_t piece_first(int64_t p, int64_t pieces, int64_t count) {
  return p * (count / pieces) + least(p, count % pieces);
}

// What a row of taps reads of eight windows of `tokens` whose pixels are equally far apart, as within a row of the answer: in
// registers. False where they are not, or that is not to be had.
template <class V>
TWOFOUR_INLINE bool turn_windows(const ByteWindows& w, const WindowAt* at, int64_t row, uint8_t* to, int64_t tokens) {
  if constexpr (V::width == 16) {
    if (w.channels % 64 != 0) return false;
    const uint8_t* from[8];
    for (int t = 0; t < 8; t++)
      if ((from[t] = at[t].row(row)) == nullptr || (t > 1 && from[t] - from[t - 1] != from[1] - from[0])) return false;
    const int64_t inputs = w.width.taps * w.channels, first = row * inputs;
    for (int64_t i = 0; i < inputs; i += 64)
      V::turn_octets(from[0] + i, from[1] - from[0], to + (first + i) * tokens, tokens * 8);
    return true;
  }
  return false;
}

// Windows [first, first + tokens) as copy_octets has rows.
template <class V>
TWOFOUR_NOINLINE void copy_windows(const ByteWindows& w, int64_t first, int64_t tokens, uint8_t* to, Range* ranges) {
  WindowAt at[kOctetTokens<V>], next(w, first);
  for (int64_t t = 0; t < tokens; t++, next.next()) {
    at[t] = next;
    ranges[t] = next.range();
  }
  for (int64_t r = 0; r < w.height.taps; r++)
    for (int64_t t0 = 0; t0 < tokens; t0 += 8) {
      const int64_t end = least(t0 + 8, tokens);
      if (end - t0 == 8 && turn_windows<V>(w, at + t0, r, to + t0 * 8, tokens)) continue;
      for (int64_t t = t0; t < end; t++) copy_taps(w, at[t], r, to + t * 8, tokens * 8);
    }
}

// Tokens [first, first + tokens) as whole numbers, [octet][token][8], and their ranges.
template <class V>
inline void copy_octets(const WindowCall& a, int64_t first, int64_t tokens, uint8_t* to, Range* ranges) {
  if (a.windows != nullptr) return copy_windows<V>(*a.windows, first, tokens, to, ranges);
  const bool bytes = a.x_type != Type::f32 && a.x_type != Type::bf16;
  const int64_t here = inputs_in_x(a);
  int64_t turned = 0, k = 0;  // tokens in eights, of which inputs below k are there
  if constexpr (V::width == 16)
    if (bytes) {
      const auto* from = static_cast<const uint8_t*>(a.x) + first * a.x_stride;
      for (turned = tokens / 8 * 8; turned > 0 && k + 64 <= here; k += 64)
        for (int64_t t = 0; t < turned; t += 8)
          V::turn_octets(from + t * a.x_stride + k, a.x_stride, to + k * tokens + t * 8, tokens * 8);
    }
  Matmul rest = a;  // the inputs of x from k on
  for (int64_t t = 0; t < tokens; t++) {
    const int64_t begin = t < turned ? k : 0;
    rest.in_features = here - begin;
    if (bytes) rest.x = static_cast<const uint8_t*>(a.x) + begin;
    ranges[t] = copy_token<V>(rest, first + t, to + begin * tokens + t * 8, tokens * 8);
  }
  if (a.more == nullptr) return;
  rest.x = a.more, rest.x_stride = a.more_stride, rest.in_features = a.in_features - here;
  for (int64_t t = 0; t < tokens; t++) {  // in the range of the whole token
    rest.quantization.dynamic = false, rest.quantization.x_scale = ranges[t].scale, rest.quantization.x_zero = ranges[t].zero;
    copy_token<V>(rest, first + t, to + here * tokens + t * 8, tokens * 8);
  }
}

template <class V>
int64_t row_octets_workspace(const Matmul& a, const Windows* windows = nullptr) {
  return a.tokens > 0 ? OctetPlan<V>(a).bytes() + ByteImages<V>(a, windows).size() : 0;
}

template <class V, class Fetch = FetchOctets>
void row_octets(const Matmul& given, const Windows* windows = nullptr) {
  if (given.tokens <= 0) return;
  const ByteImages<V> images(given, windows);
  const WindowCall a = images.call();
  const OctetPlan<V> plan(a);
  auto* ranges = static_cast<Range*>(a.workspace);
  uint8_t* x = static_cast<uint8_t*>(a.workspace) + plan.range_bytes();
  const uint8_t* units = static_cast<const uint8_t*>(a.weight) + twofour::int8_head_bytes(a.out_features);
  const int64_t unit_bytes = octet_tiles(a) * 2 * kOctetHalfBytes;
  with_team(a.threads, [&](const Team& team) {
    images.fill(team);
    int64_t u0, u1;
    team.share(twofour::int8_padded_rows(a.out_features) / (2 * kRowUnit), 1, &u0, &u1);
    for (int64_t pass = 0; pass < a.tokens; pass += plan.per_pass) {
      const int64_t count = least(plan.per_pass, a.tokens - pass);
      const int64_t pieces = (count + kOctetTokens<V> - 1) / kOctetTokens<V>;
      if (pass > 0) team.barrier();  // the last pass is still being read
      for (int64_t p = team.me; p < pieces; p += team.size) {
        const int64_t first = piece_first(p, pieces, count), tokens = piece_first(p + 1, pieces, count) - first;
        copy_octets<V>(a, pass + first, tokens, x + first * plan.row_bytes, ranges + pass + first);
      }
      team.barrier();
      const auto product = [&](int64_t u, int64_t p, Ahead ahead = {}) {
        const int64_t first = piece_first(p, pieces, count), tokens = piece_first(p + 1, pieces, count) - first;
        octet_rows_of<V, Fetch, kOctetTokens<V>>(tokens, a, units + u * unit_bytes, x + first * plan.row_bytes, ranges,
                                        pass + first, u * 2 * kRowUnit, ahead);
      };
      if (count > pieces * kRowTokens<V>) {  // each unit passes all pieces, and a part of the next one is fetched with each
        const int64_t part = round_up(ceil_div(unit_bytes, pieces), 64), each = ceil_div(part / 64, 2 * octet_tiles(a));
        for (int64_t u = u0; u < u1; u++)
          for (int64_t p = 0; p < pieces; p++) {
            const uint8_t* next = units + (u + 1) * unit_bytes;
            product(u, p, u + 1 < u1 ? Ahead{next + p * part, next + least((p + 1) * part, unit_bytes), each} : Ahead{});
          }
      } else if ((u1 - u0) * unit_bytes <= kOctetWeights) {  // they stay in L2, and whole rows of y are written in order
        for (int64_t p = 0; p < pieces; p++)
          for (int64_t u = u0; u < u1; u++) product(u, p);
      } else {
        for (int64_t u = u0; u < u1; u++)
          for (int64_t p = 0; p < pieces; p++) product(u, p);
      }
    }
  });
}

}  // namespace
