// The AVX2 + FMA rows: bfloat16 widened to float32 in the register.
#include "native/lanes_avx2.h"
#include "panels.h"
#include "rows.h"

namespace {

struct Vec : Lanes {
  static constexpr int panel_sums = 8;
  static constexpr int row_halves = 1, row_tokens = 4, row_sums = 8;

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

  // Dwords that hold two bfloat16 each, as two vectors of floats.
  static reg lower(ireg v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
  static reg upper(ireg v) { return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(-65536))); }
  static TWOFOUR_INLINE void broadcast_pair(const char* p, reg (&w)[2]) {
    const ireg both = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(p));
    w[0] = lower(both);
    w[1] = upper(both);
  }
};

}  // namespace

namespace twofour {

int64_t nm_matmul_2x4_bf16_rows__avx2__workspace(const NmMatmul& a) {
  return row_blocks_workspace<FloatGroups<Vec>>(a);
}
void nm_matmul_2x4_bf16_rows__avx2(const NmMatmul& a) { row_blocks<FloatGroups<Vec>, FetchTwice>(a); }

int64_t nm_matmul_2x4_bf16_panels__avx2__workspace(const NmMatmul& a) {
  return panel_product_workspace<FloatPanel<Vec>, 4, 1>(a);
}
void nm_matmul_2x4_bf16_panels__avx2(const NmMatmul& a) { panel_product<FloatPanel<Vec>, 4, 1>(a); }

}  // namespace twofour
