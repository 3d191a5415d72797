// Design A for vdpbf16ps: panels of all six pairs of every group, made from transposed inputs a tile at a time.
//
// Inputs are transposed once, T[tile][pair (2k, 2k + 1)][tokens] in dwords of two bfloat16: as many bytes as x. The six
// pairs of a group take three times as many, so only the tile that is being multiplied has them, in L1: every chunk of
// rows makes it anew, which is less work than fetching it. Sums are S[row][tokens].
#pragma once

#include "kernels/answers.h"
#include "native/simd.h"
#include "panels.h"

namespace {

using twofour::kBf16PairsPerGroup;

constexpr int kPairVectors = 4;       // vectors of tokens in a panel: its tile takes 25 KB of L1
constexpr int64_t kPairGroup = 4;     // panels that a tile of the weights meets before the next one is read
constexpr int64_t kPairFar = 1 << 20;  // weights of as many inputs x outputs are fetched ahead
constexpr int64_t kTilePairs = kPanelTile / 2;
// Rows behind the last group that a nibble can address: 15 in a damaged weight. Those below the least code stand in T.
constexpr int64_t kPairSpareRows = 15 - twofour::kBf16LeastCode + 1 - kBf16PairsPerGroup;
constexpr int64_t kPairTileRows = kTileGroups * kBf16PairsPerGroup + kPairSpareRows;

TWOFOUR_INLINE __m512i dwords(__m512 v) { return _mm512_castps_si512(v); }

// The operand comes from memory: gcc 12 makes two instructions of the intrinsic, which is too many where the core does
// two of these products in a cycle.
TWOFOUR_INLINE void add_dot(__m512& sum, __m512i a, const char* b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "m"(*reinterpret_cast<const __m512i*>(b)));
}

constexpr int pair_rows_at_once(int used) { return used > 2 ? 4 : 8; }

// 32 inputs of one token, the k-th pair in the k-th dword.
template <Type type>
TWOFOUR_INLINE __m512 load_pairs(const char* x, int64_t inputs) {
  const auto mask = static_cast<__mmask32>((uint64_t{1} << least(inputs, 32)) - 1);
  if constexpr (type == Type::bf16) return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, x));
  const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), x);
  const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), x + 64);
  return (__m512)_mm512_cvtne2ps_pbh(high, low);
}

// 16 numbers at a and 16 at b as bfloat16 pairs (a, b); the first `tokens` of each exist.
template <Type type>
TWOFOUR_INLINE __m512 pair_rows(const char* a, const char* b, int64_t tokens) {
  const __mmask16 mask = tokens >= 16 ? static_cast<__mmask16>(-1) : Lanes::mask(tokens);
  if constexpr (type == Type::bf16) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, a));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, b));
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                              23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const auto both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(mask, b), _mm512_maskz_loadu_ps(mask, a));
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(interleave, both));
}

// The same as transpose_inputs for an x that stands as (inputs, tokens).
template <Type type>
TWOFOUR_NOINLINE void pair_inputs(const Matmul& a, int64_t first, int used, int64_t k0, int64_t k1, float* to) {
  const int64_t stride = used * Lanes::width;
  for (int64_t k = k0; k < k1; k += 2)
    for (int u = 0; u < used; u++) {
      const int64_t token = first + u * Lanes::width;
      const char* x = element(a.x, type, k * a.x_stride + token);
      const char* next = element(a.x, type, (k + 1) * a.x_stride + token);
      const __m512 pair = k < a.in_features ? pair_rows<type>(x, next, a.tokens - token) : _mm512_setzero_ps();
      Lanes::store_aligned(to + k / 2 * stride + u * Lanes::width, pair);
    }
}

// Inputs [k0, k1) of the panel from token `first` on -> T; tokens and inputs past the end become zero.
template <Type type>
TWOFOUR_NOINLINE void transpose_inputs(const Matmul& a, int64_t first, int used, int64_t k0, int64_t k1, float* to) {
  const int64_t stride = used * Lanes::width;
  for (int u = 0; u < used; u++) {
    const int64_t token = first + u * Lanes::width, tokens = a.tokens - token;
    for (int64_t k = k0; k < k1; k += 32) {
      const auto [x, x_bytes] = inputs_at(a, type, token, k);
      const int64_t inputs = a.in_features - k;
      __m512 t[16];
      TWOFOUR_UNROLL
      for (int i = 0; i < 16; i++)
        t[i] = i < tokens && inputs > 0 ? load_pairs<type>(x + i * x_bytes, inputs) : _mm512_setzero_ps();
      Lanes::transpose(t);
      TWOFOUR_UNROLL
      for (int i = 0; i < 16; i++) Lanes::store_aligned(to + (k / 2 + i) * stride + u * Lanes::width, t[i]);
    }
  }
}

// A tile of T -> the six pairs of every group: P[6 * group + nibble - 2][tokens], the nibble that of the metadata.
template <int U>
TWOFOUR_NOINLINE void spread_pairs(const float* from, float* tile) {
  constexpr int64_t stride = panel_stride(U) * Lanes::width;
  const __m512i upper = _mm512_set1_epi32(-65536);
  for (int g = 0; g < kTileGroups; g++, from += 2 * U * Lanes::width, tile += kBf16PairsPerGroup * stride) {
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) {
      const __m512i a = dwords(Lanes::load_aligned(from + u * Lanes::width));          // inputs 0 and 1
      const __m512i b = dwords(Lanes::load_aligned(from + (U + u) * Lanes::width));  // inputs 2 and 3
      const auto put = [&](int code, __m512i pair) {
        _mm512_store_si512(tile + (code - twofour::kBf16LeastCode) * stride + u * Lanes::width, pair);
      };
      const __m512i zero_up = _mm512_slli_epi32(a, 16), three_down = _mm512_srli_epi32(b, 16);
      put(4, a);
      put(2, _mm512_or_si512(_mm512_andnot_si512(upper, b), zero_up));
      put(3, _mm512_or_si512(three_down, zero_up));
      put(6, _mm512_ternarylogic_epi32(upper, a, b, 0xca));
      put(7, _mm512_or_si512(three_down, _mm512_and_si512(upper, a)));
      put(11, _mm512_rol_epi32(b, 16));
    }
  }
}

// Group g of a quad's four: R rows against U vectors of tokens, each row's weights broadcast by an immediate shuffle,
// which Zen 5 does beside its loads and products at no cost.
template <int g, int U, int R>
TWOFOUR_INLINE void add_group(const __m512 (&four)[R], const char* x, const uint64_t (&meta)[R], __m512 (&acc)[R][U]) {
  constexpr int64_t stride = panel_stride(U) * 64;
  constexpr int shift = log2_of(stride);
  TWOFOUR_UNROLL
  for (int r = 0; r < R; r++) {
    const char* row = x + (shifted(meta[r], shift - 4 * g) & uint64_t{15} << shift) + g * kBf16PairsPerGroup * stride;
    const __m512i w = dwords(_mm512_permute_ps(four[r], g % 4 * 0x55));
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) add_dot(acc[r][u], w, row + u * 64);
  }
}

// Groups [4 q, 4 q + 4) of R rows, from the lines that hold their pairs of weights.
template <int q, int U, int R>
TWOFOUR_INLINE void add_quad(const __m512 (&lines)[R], const char* x, const uint64_t (&meta)[R], __m512 (&acc)[R][U]) {
  __m512 four[R];
  TWOFOUR_UNROLL
  for (int r = 0; r < R; r++) four[r] = _mm512_shuffle_f32x4(lines[r], lines[r], q * 0x55);
  add_group<4 * q, U>(four, x, meta, acc);
  add_group<4 * q + 1, U>(four, x, meta, acc);
  add_group<4 * q + 2, U>(four, x, meta, acc);
  add_group<4 * q + 3, U>(four, x, meta, acc);
}

// One tile (its first `quads` quads) of R rows; their sums are formed apart and then added to y.
template <int U, int R>
TWOFOUR_INLINE void add_pair_rows(const char* metadata, const char* values, int64_t quads, const char* x, bool first,
                                  float* y) {
  __m512 acc[R][U];
  TWOFOUR_UNROLL
  for (int r = 0; r < R; r++) {
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) acc[r][u] = _mm512_setzero_ps();
  }
  uint64_t meta[R];
  std::memcpy(meta, metadata, sizeof meta);
  // A line of weights per row is loaded once and its quads are shuffled out: 3 to 4 % over a load of each quad.
  __m512 lines[R];
  TWOFOUR_UNROLL
  for (int r = 0; r < R; r++) lines[r] = Lanes::load_shared(reinterpret_cast<const float*>(values + r * kPanelTile));
  add_quad<0, U>(lines, x, meta, acc);
  if (quads == kTileGroups / 4) {
    add_quad<1, U>(lines, x, meta, acc);
    add_quad<2, U>(lines, x, meta, acc);
    add_quad<3, U>(lines, x, meta, acc);
  } else {
    if (quads > 1) add_quad<1, U>(lines, x, meta, acc);
    if (quads > 2) add_quad<2, U>(lines, x, meta, acc);
  }
  TWOFOUR_UNROLL
  for (int r = 0; r < R; r++) {
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) {
      float* at = y + (r * panel_stride(U) + u) * Lanes::width;
      Lanes::store_aligned(at, first ? acc[r][u] : acc[r][u] + Lanes::load_aligned(at));
    }
  }
}

// Which share of the next tile of the weights a pass over this one brings into L2: spread evenly over the panels of a
// group, since all of it during the last one was up to 10 % slower from memory.
struct Fetch {
  int part, parts;  // parts 0: none

  int line(int of, int at) const { return parts > 0 ? of * at / parts : 0; }
};

// Tile t of one chunk against one panel's T; `scratch` takes the tile's pairs.
template <int U>
TWOFOUR_NOINLINE void add_pair_tile(int used, const Matmul& a, const RowChunk& chunk, int64_t t, const float* inputs,
                                    float* scratch, float* y, Fetch fetch) {
  if constexpr (U > 1)
    if (used < U) return add_pair_tile<U - 1>(used, a, chunk, t, inputs, scratch, y, fetch);
  constexpr int64_t stride = panel_stride(U) * Lanes::width;
  constexpr int R = pair_rows_at_once(U);
  spread_pairs<U>(inputs + t * kTilePairs * U * Lanes::width, scratch);
  const char* x = reinterpret_cast<const char*>(scratch - twofour::kBf16LeastCode * stride);
  const int64_t quads = least(kTileGroups / 4, ceil_div(a.in_features - t * kPanelTile, 16));
  const char* tile = chunk.tiles + t * chunk.tile_bytes;
  const char* values = tile + chunk.meta_bytes;
  const int from = fetch.line(R, fetch.part), to = fetch.line(R, fetch.part + 1);
  int64_t row = chunk.row % kPanelRows;
  const int64_t end = row + chunk.rows;
  for (; row + R <= end; row += R, y += R * stride) {
    for (int r = from; r < to; r++) __builtin_prefetch(values + chunk.tile_bytes + (row + r) * kPanelTile, 0, 2);
    add_pair_rows<U, R>(tile + row * 8, values + row * kPanelTile, quads, x, t == 0, y);
  }
  for (; row < end; row++, y += stride)
    add_pair_rows<U, 1>(tile + row * 8, values + row * kPanelTile, quads, x, t == 0, y);
}

// Sums S[row][tokens] of rows [m0, m1), a multiple of 32 -> bfloat16 y[token][row] without another operand: rounded and
// paired before they are transposed, so that a token gets a whole line and half the shuffles do.
template <Activation kind>
TWOFOUR_NOINLINE void store_pairs_as(const Matmul& a, int64_t first, int used, int64_t m0, int64_t m1,
                                     const float* sums) {
  const int64_t stride = panel_stride(used) * Lanes::width;
  const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                              23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int u = 0; u < used; u++)
    for (int64_t m = m0; m < m1; m += 32) {
      const int64_t token = first + u * Lanes::width;
      const float* from = sums + (m - m0) * stride + u * Lanes::width;
      using W = Beside<Lanes, tokens_beside(kind) == 1 ? 2 : 4>;
      constexpr int beside = sizeof(typename W::reg) / sizeof(__m512);
      __m512 t[16];
      TWOFOUR_UNROLL
      for (int i = 0; i < 32; i += beside) {
        const auto rows = activated<kind, W, Rounding::bfloat16>(W::each([&](int r) TWOFOUR_INLINED {
          const __m512 sum = Lanes::load_aligned(from + (i + r) * stride);
          return a.bias == nullptr ? sum : _mm512_add_ps(sum, _mm512_set1_ps(a.bias[m + i + r]));
        }));
        TWOFOUR_UNROLL
        for (int r = 0; r < beside; r += 2) {
          const __m512i two = (__m512i)_mm512_cvtne2ps_pbh(rows.v[r + 1], rows.v[r]);
          t[(i + r) / 2] = _mm512_castsi512_ps(_mm512_permutexvar_epi16(interleave, two));
        }
      }
      Lanes::transpose(t);
      for (int i = 0; i < 16 && token + i < a.tokens; i++)
        _mm512_storeu_ps(const_cast<char*>(element(a.y, a.y_type, (token + i) * a.y_stride + m)), t[i]);
    }
}

// Sums S[row][tokens] of rows [m0, m1) -> y[token][row], 32 rows at a time where the epilogue allows it.
void store_pair_sums(const Matmul& a, int64_t first, int used, int64_t m0, int64_t m1, const float* sums) {
  if (a.columns) return store_rows<Lanes>(a, first, used, m0, m1, sums);
  const int64_t stride = panel_stride(used) * Lanes::width;
  const bool paired = a.y_type == Type::bf16 && a.epilogue.combine == Combine::none;
  const int64_t whole = paired ? (m1 - m0) / 32 * 32 : 0;
  if (whole < m1 - m0) unpack_sums<Lanes>(a, first, used, m0 + whole, m1, sums + whole * stride);
  if (whole > 0)
    with_activation(a.epilogue.activation, [&](auto constant) {
      store_pairs_as<decltype(constant)::value>(a, first, used, m0, m0 + whole, sums);
    });
}

// Panels of up to kPairVectors vectors of tokens, evenly filled.
struct PairPlan {
  int64_t vectors, panel_tokens, panels, group, inputs_floats, tile_floats, sums_floats;

  explicit PairPlan(const Matmul& a) {
    const int64_t all = a.tokens > 0 ? ceil_div(a.tokens, Lanes::width) : 1;
    vectors = ceil_div(all, ceil_div(all, kPairVectors));
    panel_tokens = vectors * Lanes::width;
    panels = ceil_div(all, vectors);
    group = least(kPairGroup, panels);
    const int64_t stride = panel_stride(static_cast<int>(vectors)) * Lanes::width;
    inputs_floats = panel_tiles(a) * kTilePairs * panel_tokens;
    tile_floats = kPairTileRows * stride;
    sums_floats = least(kPanelRows, a.out_features) * stride;
  }
  int used(const Matmul& a, int64_t panel) const {
    return static_cast<int>(least(ceil_div(a.tokens - panel * panel_tokens, Lanes::width), vectors));
  }
  int64_t member_floats() const { return tile_floats + group * sums_floats; }
};

int64_t pair_product_workspace(const Matmul& a) {
  const PairPlan plan(a);
  return (plan.group * plan.inputs_floats + (a.threads > 1 ? a.threads : 1) * plan.member_floats()) * 4;
}

// Panels [p0, p1), transposed: rows [begin, end) of the output, chunk by chunk.
void multiply_pairs(const Matmul& a, const PairPlan& plan, int64_t begin, int64_t end, int64_t p0, int64_t p1,
                    const float* inputs, float* scratch) {
  float* sums = scratch + plan.tile_floats;
  const bool far = a.out_features * a.in_features >= kPairFar;
  for (int64_t m = begin; m < end;) {
    const RowChunk chunk(a, m, end);
    for (int64_t t = 0; t < panel_tiles(a); t++)
      for (int64_t p = p0; p < p1; p++) {
        const Fetch fetch{static_cast<int>(p - p0), far ? static_cast<int>(p1 - p0) : 0};
        add_pair_tile<kPairVectors>(plan.used(a, p), a, chunk, t, inputs + (p - p0) * plan.inputs_floats, scratch,
                                    sums + (p - p0) * plan.sums_floats, fetch);
      }
    for (int64_t p = p0; p < p1; p++)
      store_pair_sums(a, p * plan.panel_tokens, plan.used(a, p), m, m + chunk.rows,
                      sums + (p - p0) * plan.sums_floats);
    m += chunk.rows;
  }
}

// The members share the transposing of every group of panels, then the rows of the output.
void pair_product(const Matmul& a) {
  if (a.tokens <= 0) return;
  const PairPlan plan(a);
  float* inputs = static_cast<float*>(a.workspace);
  with_team(a.threads, [&](const Team& team) {
    float* scratch = inputs + plan.group * plan.inputs_floats + team.me * plan.member_floats();
    int64_t k0, k1, begin, end;
    team.share(panel_tiles(a) * kPanelTile, kPanelTile, &k0, &k1);
    team.share(a.out_features, 16, &begin, &end);
    for (int64_t p0 = 0; p0 < plan.panels; p0 += plan.group) {
      const int64_t p1 = least(p0 + plan.group, plan.panels);
      if (p0 > 0) team.barrier();  // the inputs of the last group are still being read
      for (int64_t p = p0; p < p1; p++) {
        const bool wide = a.x_type == Type::f32;
        const auto transpose = a.columns ? (wide ? pair_inputs<Type::f32> : pair_inputs<Type::bf16>)
                                         : (wide ? transpose_inputs<Type::f32> : transpose_inputs<Type::bf16>);
        transpose(a, p * plan.panel_tokens, plan.used(a, p), k0, k1, inputs + (p - p0) * plan.inputs_floats);
      }
      team.barrier();
      multiply_pairs(a, plan, begin, end, p0, p1, inputs, scratch);
    }
  });
}

}  // namespace
