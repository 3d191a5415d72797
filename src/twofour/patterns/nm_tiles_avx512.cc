// Sixteen tiles at once.
#include <immintrin.h>

#include "nm_tiles_search.h"

namespace {

struct Vec {
  typedef float F __attribute__((vector_size(64)));
  typedef int32_t I __attribute__((vector_size(64)));
  static constexpr int width = 16;

  // The 4 x 4 transpose inside 128-bit lanes; in_order puts the tiles, now (lane, vector), back into (vector, lane).
  static TWOFOUR_INLINE void split(F (&x)[4]) {
    const __m512 a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpackhi_ps(x[0], x[1]);
    const __m512 c = _mm512_unpacklo_ps(x[2], x[3]), d = _mm512_unpackhi_ps(x[2], x[3]);
    x[0] = _mm512_shuffle_ps(a, c, 0x44);
    x[1] = _mm512_shuffle_ps(a, c, 0xee);
    x[2] = _mm512_shuffle_ps(b, d, 0x44);
    x[3] = _mm512_shuffle_ps(b, d, 0xee);
  }
  static TWOFOUR_INLINE I in_order(I mask) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return (I)_mm512_permutexvar_epi32(order, (__m512i)mask);
  }
};

}  // namespace

namespace twofour {

bool nm_tiles_2x4_f32__avx512(const NmTiles& a) { return search<Vec>(a); }

}  // namespace twofour
