// Eight tiles at once.
#include <immintrin.h>

#include "nm_tiles_search.h"

namespace {

struct Vec {
  typedef float F __attribute__((vector_size(32)));
  typedef int32_t I __attribute__((vector_size(32)));
  static constexpr int width = 8;

  // The 4 x 4 transpose inside 128-bit lanes; in_order puts the tiles, now (lane, vector), back into (vector, lane).
  static TWOFOUR_INLINE void split(F (&x)[4]) {
    const __m256 a = _mm256_unpacklo_ps(x[0], x[1]), b = _mm256_unpackhi_ps(x[0], x[1]);
    const __m256 c = _mm256_unpacklo_ps(x[2], x[3]), d = _mm256_unpackhi_ps(x[2], x[3]);
    x[0] = _mm256_shuffle_ps(a, c, 0x44);
    x[1] = _mm256_shuffle_ps(a, c, 0xee);
    x[2] = _mm256_shuffle_ps(b, d, 0x44);
    x[3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  static TWOFOUR_INLINE I in_order(I mask) {
    return (I)_mm256_permutevar8x32_epi32((__m256i)mask, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
};

}  // namespace

namespace twofour {

bool nm_tiles_2x4_f32__avx2(const NmTiles& a) { return search<Vec>(a); }

}  // namespace twofour
