// The AVX2 + FMA rows: bfloat16 widened to float32 in the register.
#include <immintrin.h>

#include "panels.h"
#include "rows.h"

namespace {

struct Vec {
  using reg = __m256;
  using ireg = __m256i;
  static constexpr int width = 8;
  static constexpr int panel_sums = 8;
  static constexpr int row_halves = 1, row_tokens = 4, row_sums = 8;

  static __m256i mask(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static reg zero() { return _mm256_setzero_ps(); }
  static reg load(const float* p) { return _mm256_load_ps(p); }
  static reg load_unaligned(const float* p) { return _mm256_loadu_ps(p); }
  static reg load_partial(const float* p, int64_t count) { return _mm256_maskload_ps(p, mask(count)); }
  static void store(float* p, reg v) { _mm256_store_ps(p, v); }
  static void store_unaligned(float* p, reg v) { _mm256_storeu_ps(p, v); }
  static void store_partial(float* p, reg v, int64_t count) { _mm256_maskstore_ps(p, mask(count), v); }

  // bfloat16 in memory as the upper halves of floats, and back.
  static reg load_upper(const char* p) {
    const __m256i v = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
  }
  static reg load_upper_partial(const char* p, int64_t count) {
    alignas(16) char words[16] = {};
    std::memcpy(words, p, static_cast<size_t>(2 * count));
    return load_upper(words);
  }
  static __m128i uppers(reg v) {
    const __m256i words = _mm256_srli_epi32(_mm256_castps_si256(v), 16);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08));
  }
  static void store_upper(char* p, reg v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), uppers(v)); }
  static void store_upper_partial(char* p, reg v, int64_t count) {
    const __m128i words = uppers(v);
    std::memcpy(p, &words, static_cast<size_t>(2 * count));
  }

  static reg broadcast4(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }
  static reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
  static reg fma(reg w, const float* x, reg sum) { return _mm256_fmadd_ps(w, _mm256_load_ps(x), sum); }
  static reg fma(reg w, reg x, reg sum) { return _mm256_fmadd_ps(w, x, sum); }
  // Forced inline: gcc 12 takes a function that only prefetches for one without effect and drops its calls.
  static TWOFOUR_INLINE void prefetch(const char* p, int64_t near, int64_t far) {
    _mm_prefetch(p + near, _MM_HINT_T0);
    _mm_prefetch(p + far, _MM_HINT_T1);
  }

  // Dwords that hold two bfloat16 each, as two vectors of floats.
  static reg lower(ireg v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
  static reg upper(ireg v) { return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(-65536))); }
  static TWOFOUR_INLINE void broadcast_pair(const char* p, reg (&w)[2]) {
    const ireg both = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(p));
    w[0] = lower(both);
    w[1] = upper(both);
  }

  static ireg load_index(const char* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
  template <int bits>
  static ireg shift_right(ireg v) {
    return _mm256_srli_epi32(v, bits);
  }
  static reg permute4(reg x, ireg i) { return _mm256_permutevar_ps(x, i); }

  static void transpose(reg (&t)[8]) {
    reg s[8];
    TWOFOUR_UNROLL
    for (int i = 0; i < 8; i += 4) {
      const reg a = _mm256_unpacklo_ps(t[i], t[i + 1]), b = _mm256_unpackhi_ps(t[i], t[i + 1]);
      const reg c = _mm256_unpacklo_ps(t[i + 2], t[i + 3]), d = _mm256_unpackhi_ps(t[i + 2], t[i + 3]);
      s[i] = _mm256_shuffle_ps(a, c, 0x44);
      s[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
      s[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
      s[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
    TWOFOUR_UNROLL
    for (int i = 0; i < 4; i++) {
      t[i] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x20);
      t[i + 4] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x31);
    }
  }
};

}  // namespace

namespace twofour {

int64_t nm_matmul_2x4_bf16_rows__avx2__workspace(const NmMatmul& a) {
  return row_blocks_workspace<FloatGroups<Vec>>(a);
}
void nm_matmul_2x4_bf16_rows__avx2(const NmMatmul& a) { row_blocks<FloatGroups<Vec>>(a); }

int64_t nm_matmul_2x4_bf16_panels__avx2__workspace(const NmMatmul& a) {
  return panel_product_workspace<FloatPanel<Vec>, 4, 1>(a);
}
void nm_matmul_2x4_bf16_panels__avx2(const NmMatmul& a) { panel_product<FloatPanel<Vec>, 4, 1>(a); }

}  // namespace twofour
