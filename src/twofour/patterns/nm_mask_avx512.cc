// 2:4 by comparing each value with the three others of its group, four groups a vector.
#include <immintrin.h>

#include "keep_avx512.h"
#include "nm_mask.h"

namespace twofour {
namespace {

// Any finite floats: an order-preserving integer needs all 32 bits, so compares.
inline __mmask16 keep_of_scores(__m512 score) {
  const __m512i bits = _mm512_castps_si512(_mm512_add_ps(score, _mm512_setzero_ps()));  // -0.0 becomes +0.0
  const __m512i sign = _mm512_srai_epi32(bits, 31);
  const __m512i key = _mm512_xor_si512(bits, _mm512_and_si512(sign, _mm512_set1_epi32(0x7fffffff)));
  const __m512i r1 = _mm512_shuffle_epi32(key, static_cast<_MM_PERM_ENUM>(0x39));
  const __m512i r2 = _mm512_shuffle_epi32(key, static_cast<_MM_PERM_ENUM>(0x4e));
  const __m512i r3 = _mm512_shuffle_epi32(key, static_cast<_MM_PERM_ENUM>(0x93));
  const __mmask16 l1 = _mm512_cmpgt_epi32_mask(r1, key) | _mm512_mask_cmpeq_epi32_mask(0x8888, r1, key);
  const __mmask16 l2 = _mm512_cmpgt_epi32_mask(r2, key) | _mm512_mask_cmpeq_epi32_mask(0xcccc, r2, key);
  const __mmask16 l3 = _mm512_cmpgt_epi32_mask(r3, key) | _mm512_mask_cmpeq_epi32_mask(0xeeee, r3, key);
  return static_cast<__mmask16>(~((l1 & l2) | (l1 & l3) | (l2 & l3)));
}

// 16 scores, the first `lanes` of them real; `largest` collects the largest magnitude seen.
template <bool kAbsolute>
inline void keep_sixteen(const NmMask& a, int64_t i, __mmask16 lanes, __m512i* largest) {
  const __m512 score = _mm512_maskz_loadu_ps(lanes, a.scores + i);
  const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(score), _mm512_set1_epi32(0x7fffffff));
  *largest = _mm512_max_epi32(*largest, magnitude);
  const __mmask16 keep = kAbsolute ? keep_of_magnitudes(magnitude) : keep_of_scores(score);
  _mm_mask_storeu_epi8(a.keep + i, lanes, _mm_maskz_set1_epi8(keep, 1));
}

template <bool kAbsolute>
bool run(const NmMask& a) {
  const int64_t count = a.groups * 4;
  __m512i largest = _mm512_setzero_si512();
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) keep_sixteen<kAbsolute>(a, i, 0xffff, &largest);
  if (i < count) keep_sixteen<kAbsolute>(a, i, static_cast<__mmask16>((1u << (count - i)) - 1), &largest);
  // Infinity is the smallest magnitude that is not finite; NaNs are above it.
  return _mm512_cmpge_epi32_mask(largest, _mm512_set1_epi32(0x7f800000)) == 0;
}

}  // namespace

bool nm_mask_2x4_f32__avx512(const NmMask& a) { return a.absolute ? run<true>(a) : run<false>(a); }

}  // namespace twofour
