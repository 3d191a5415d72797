#include "native/lanes_avx512.h"

#include "rows.h"

namespace {

struct Vec : Lanes {
  typedef float F __attribute__((vector_size(64)));
  typedef int32_t I __attribute__((vector_size(64)));
  typedef uint32_t U __attribute__((vector_size(64)));
  typedef uint16_t H __attribute__((vector_size(32)));

  static TWOFOUR_INLINE U lanes() { return U{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

  static TWOFOUR_INLINE F evens(F a, F b) {
    return (F)_mm512_permutex2var_ps((reg)a, (ireg)(lanes() * 2), (reg)b);
  }
  static TWOFOUR_INLINE F odds(F a, F b) {
    return (F)_mm512_permutex2var_ps((reg)a, (ireg)(lanes() * 2 + 1), (reg)b);
  }
  static TWOFOUR_INLINE F lows(F a, F b) {
    return (F)_mm512_permutex2var_ps((reg)a, (ireg)(lanes() / 2 + lanes() % 2 * 16), (reg)b);
  }
  static TWOFOUR_INLINE F highs(F a, F b) {
    return (F)_mm512_permutex2var_ps((reg)a, (ireg)(lanes() / 2 + lanes() % 2 * 16 + 8), (reg)b);
  }
  // Bytes, then low + 16 * high of every two.
  static TWOFOUR_INLINE uint64_t nibbles(U codes) {
    const __m128i words = _mm_maddubs_epi16(_mm512_cvtepi32_epi8((ireg)codes), _mm_set1_epi16(0x1001));
    return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_packus_epi16(words, words)));
  }
};

}  // namespace

namespace twofour {

void nm_gradient_2x4__avx512(const NmGradient& a) { prune_gradient<Vec>(a); }

}  // namespace twofour
