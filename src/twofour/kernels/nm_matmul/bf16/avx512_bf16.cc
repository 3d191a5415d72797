// The AVX512-BF16 rows: vdpbf16ps multiplies pairs. It adds both products with round to nearest and takes denormals for
// zero, so these rows and the others differ in the last bits.
#include "avx512.h"
#include "panels.h"
#include "rows.h"

namespace {

TWOFOUR_INLINE __m512 dot(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
// The same with its operand from memory. gcc 12 makes two instructions of the intrinsic, which is too many where the
// core does two of these products in a cycle.
TWOFOUR_INLINE void add_dot(__m512& sum, __m512i a, const char* b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "m"(*reinterpret_cast<const __m512i*>(b)));
}

// Groups as pairs: one permute of words and one vdpbf16ps. Activations are pieces of four bfloat16.
struct PairGroups {
  using V = Vec;
  static constexpr int64_t piece = 8;
  using Index = __m512i;
  using Weights = __m512i;
  using Inputs = __m512i;

  static TWOFOUR_INLINE Index load_index(const char* p) { return _mm512_load_si512(p); }
  static TWOFOUR_INLINE Index next(Index i) { return _mm512_srli_epi16(i, 2); }
  static TWOFOUR_INLINE Weights load_weights(const char* p) { return _mm512_load_si512(p); }
  static TWOFOUR_INLINE Inputs broadcast(const char* p) {
    return _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  // x repeats every four words, so the three index bits above the low two may be anything.
  static TWOFOUR_INLINE void add(int group, Inputs x, Index i, Weights w, __m512& a, __m512& b) {
    __m512& sum = group % 2 == 0 ? a : b;
    sum = dot(sum, _mm512_permutexvar_epi16(i, x), w);
  }
  static TWOFOUR_INLINE void write(char* to, __m512 x) { Vec::store_upper(to, x); }
};

// Panels of all six pairs of every group: P[group][pair][tokens], two bfloat16 of a token in a dword. Row
// 6 * group + nibble - 2 holds the pair that a nibble of the metadata names; every row below the last few is taken.
struct PairPanel {
  using V = Vec;
  static constexpr int64_t group_rows = twofour::kBf16PairsPerGroup, inputs_at_once = 32;
  static constexpr int64_t first_row = twofour::kBf16LeastCode;
  static constexpr int64_t spare_rows = twofour::kBf16MostCode - twofour::kBf16LeastCode + 1 - group_rows;
  static constexpr int most_rows = 8;

  // 32 inputs of one token, the k-th pair in the k-th dword.
  template <Type type>
  static TWOFOUR_INLINE __m512 load_pairs(const char* x, int64_t inputs) {
    const auto mask = static_cast<__mmask32>((uint64_t{1} << least(inputs, 32)) - 1);
    if constexpr (type == Type::bf16) return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, x));
    const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), x);
    const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), x + 64);
    return (__m512)_mm512_cvtne2ps_pbh(high, low);
  }

  template <Type type, bool whole>
  static TWOFOUR_INLINE void pack(const char* x, int64_t x_bytes, int64_t tokens, int64_t inputs, float* panel,
                                  int64_t stride) {
    __m512 t[16];
    TWOFOUR_UNROLL
    for (int i = 0; i < 16; i++) {
      if (whole) t[i] = load_pairs<type>(x + i * x_bytes, 32);
      else t[i] = i < tokens && inputs > 0 ? load_pairs<type>(x + i * x_bytes, inputs) : _mm512_setzero_ps();
    }
    Vec::transpose(t);
    const __m512i upper = _mm512_set1_epi32(-65536);
    TWOFOUR_UNROLL
    for (int g = 0; g < 8; g++) {
      const __m512i a = _mm512_castps_si512(t[2 * g]), b = _mm512_castps_si512(t[2 * g + 1]);  // (0, 1), (2, 3)
      const auto put = [&](int code, __m512i pair) {
        _mm512_store_si512(panel + (g * group_rows + code - first_row) * stride, pair);
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

  // Four groups (16 inputs) of R rows against U vectors of tokens: one load of a row's four pairs of weights, each
  // broadcast by an immediate shuffle, which Zen 5 does beside its loads and products at no cost.
  template <int U, int R>
  static TWOFOUR_INLINE void add_four(const char* values, int64_t row_bytes, const char* x, const uint64_t (&meta)[R],
                                      __m512 (&acc)[R][U]) {
    __m512 four[R];
    TWOFOUR_UNROLL
    for (int r = 0; r < R; r++) four[r] = Vec::broadcast4(reinterpret_cast<const float*>(values + r * row_bytes));
    add_group<0, U>(four, x, meta, acc);
    add_group<1, U>(four, x, meta, acc);
    add_group<2, U>(four, x, meta, acc);
    add_group<3, U>(four, x, meta, acc);
  }
  template <int g, int U, int R>
  static TWOFOUR_INLINE void add_group(const __m512 (&four)[R], const char* x, const uint64_t (&meta)[R],
                                       __m512 (&acc)[R][U]) {
    constexpr int64_t stride = panel_stride(U) * 64;
    constexpr int shift = log2_of(stride);
    TWOFOUR_UNROLL
    for (int r = 0; r < R; r++) {
      const char* row = x + (shifted(meta[r], shift - 4 * g) & uint64_t{15} << shift) + g * group_rows * stride;
      const __m512i w = _mm512_castps_si512(_mm512_permute_ps(four[r], g * 0x55));
      TWOFOUR_UNROLL
      for (int u = 0; u < U; u++) add_dot(acc[r][u], w, row + u * 64);
    }
  }
};

}  // namespace

namespace twofour {

int64_t nm_matmul_2x4_bf16_rows__avx512_bf16__workspace(const NmMatmul& a) {
  return row_blocks_workspace<PairGroups>(a);
}
void nm_matmul_2x4_bf16_rows__avx512_bf16(const NmMatmul& a) { row_blocks<PairGroups>(a); }

int64_t nm_matmul_2x4_bf16_panels__avx512_bf16__workspace(const NmMatmul& a) {
  return panel_product_workspace<PairPanel, 4, 1>(a);
}
void nm_matmul_2x4_bf16_panels__avx512_bf16(const NmMatmul& a) { panel_product<PairPanel, 4, 1>(a); }

}  // namespace twofour
