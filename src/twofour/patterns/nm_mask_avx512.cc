// 2:4 by comparing each value with the three others of its group, four groups a vector.
#include <immintrin.h>

#include "nm_mask.h"

namespace twofour {
namespace {

inline __m512i sort_key(__m512 score, bool absolute) {
  const __m512i bits = _mm512_castps_si512(_mm512_add_ps(score, _mm512_setzero_ps()));  // -0.0 becomes +0.0
  const __m512i magnitude_mask = _mm512_set1_epi32(0x7fffffff);
  if (absolute) return _mm512_and_si512(bits, magnitude_mask);
  return _mm512_xor_si512(bits, _mm512_and_si512(_mm512_srai_epi32(bits, 31), magnitude_mask));
}

// A lane loses to another when that one is larger, or equal and of lower index (the masks 0x8888, 0xcccc, 0xeeee
// mark the lanes whose rotated neighbour has the lower index). Kept = loses to at most one of three.
inline __mmask16 keep_two_of_four(__m512i key) {
  const __m512i r1 = _mm512_shuffle_epi32(key, static_cast<_MM_PERM_ENUM>(0x39));
  const __m512i r2 = _mm512_shuffle_epi32(key, static_cast<_MM_PERM_ENUM>(0x4e));
  const __m512i r3 = _mm512_shuffle_epi32(key, static_cast<_MM_PERM_ENUM>(0x93));
  const __mmask16 l1 = _mm512_cmpgt_epi32_mask(r1, key) | _mm512_mask_cmpeq_epi32_mask(0x8888, r1, key);
  const __mmask16 l2 = _mm512_cmpgt_epi32_mask(r2, key) | _mm512_mask_cmpeq_epi32_mask(0xcccc, r2, key);
  const __mmask16 l3 = _mm512_cmpgt_epi32_mask(r3, key) | _mm512_mask_cmpeq_epi32_mask(0xeeee, r3, key);
  return static_cast<__mmask16>(~((l1 & l2) | (l1 & l3) | (l2 & l3)));
}

template <bool kAbsolute>
bool run(const NmMask& a) {
  const int64_t count = a.groups * 4;
  const __m512i exponent = _mm512_set1_epi32(0x7f800000);
  __mmask16 bad = 0;
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t left = count - i;
    const __mmask16 lanes = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
    const __m512 score = _mm512_maskz_loadu_ps(lanes, a.scores + i);
    const __m512i infinite = _mm512_and_si512(_mm512_castps_si512(score), exponent);
    bad |= _mm512_cmpeq_epi32_mask(infinite, exponent);
    const __m128i keep = _mm_maskz_set1_epi8(keep_two_of_four(sort_key(score, kAbsolute)), 1);
    _mm_mask_storeu_epi8(a.keep + i, lanes, keep);
  }
  return bad == 0;
}

}  // namespace

bool nm_mask_2x4_f32__avx512(const NmMask& a) { return a.absolute ? run<true>(a) : run<false>(a); }

}  // namespace twofour
