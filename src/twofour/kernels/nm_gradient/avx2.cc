#include "native/lanes_avx2.h"

#include "rows.h"

namespace {

struct Vec : Lanes {
  typedef float F __attribute__((vector_size(32)));
  typedef int32_t I __attribute__((vector_size(32)));
  typedef uint32_t U __attribute__((vector_size(32)));
  typedef uint16_t H __attribute__((vector_size(16)));

  static TWOFOUR_INLINE U lanes() { return U{0, 1, 2, 3, 4, 5, 6, 7}; }

  // Quarters 0 2 1 3: what a shuffle inside the halves leaves out of order.
  static TWOFOUR_INLINE F ordered(reg v) {
    return (F)_mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8));
  }
  static TWOFOUR_INLINE F evens(F a, F b) { return ordered(_mm256_shuffle_ps((reg)a, (reg)b, 0x88)); }
  static TWOFOUR_INLINE F odds(F a, F b) { return ordered(_mm256_shuffle_ps((reg)a, (reg)b, 0xdd)); }
  static TWOFOUR_INLINE F lows(F a, F b) {
    const reg low = _mm256_unpacklo_ps((reg)a, (reg)b), high = _mm256_unpackhi_ps((reg)a, (reg)b);
    return (F)_mm256_permute2f128_ps(low, high, 0x20);
  }
  static TWOFOUR_INLINE F highs(F a, F b) {
    const reg low = _mm256_unpacklo_ps((reg)a, (reg)b), high = _mm256_unpackhi_ps((reg)a, (reg)b);
    return (F)_mm256_permute2f128_ps(low, high, 0x31);
  }
  // Bytes, then low + 16 * high of every two.
  static TWOFOUR_INLINE uint64_t nibbles(U codes) {
    const auto v = (ireg)codes;
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    const __m128i sums = _mm_maddubs_epi16(_mm_packus_epi16(words, words), _mm_set1_epi16(0x1001));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_packus_epi16(sums, sums)));
  }
};

}  // namespace

namespace twofour {

void nm_gradient_2x4__avx2(const NmGradient& a) { prune_gradient<Vec>(a); }

}  // namespace twofour
