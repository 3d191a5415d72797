// Which two of every four magnitudes are kept, four groups a vector: shared by the mask and the compress kernels.
// Only for files compiled for AVX-512; internal linkage, so each carries its own copy.
#pragma once

#include <immintrin.h>

namespace twofour {
namespace {

// Kept lanes of four groups: those that lose to at most one other of their group. A lane loses to another when that one
// is larger, or equal and of lower index; so of any two lanes exactly one loses, and what lane i + 1 loses to lane i need
// not be computed: it is the opposite of what lane i loses to lane i + 1.

// Magnitudes are below 2^31, so a difference has the right sign: bit 31 is set where the lane loses. Arithmetic leaves
// port 5 to the shuffles; compares into mask registers would queue there too (17 against 30 GB/s from L2 on one Xeon).
inline __mmask16 keep_of_magnitudes(__m512i key) {
  const __m512i lower1 = _mm512_set4_epi32(1, 0, 0, 0);  // the neighbour at +1 of lane 3 is lane 0: lower index
  const __m512i lower2 = _mm512_set4_epi32(1, 1, 0, 0);
  const __m512i r1 = _mm512_shuffle_epi32(key, static_cast<_MM_PERM_ENUM>(0x39));
  const __m512i r2 = _mm512_shuffle_epi32(key, static_cast<_MM_PERM_ENUM>(0x4e));
  const __m512i l1 = _mm512_sub_epi32(_mm512_sub_epi32(key, lower1), r1);
  const __m512i l2 = _mm512_sub_epi32(_mm512_sub_epi32(key, lower2), r2);
  const __m512i won3 = _mm512_shuffle_epi32(l1, static_cast<_MM_PERM_ENUM>(0x93));
  // Truth table of majority(l1, l2, not won3), inputs in the order l1, l2, won3.
  const __m512i loses_twice = _mm512_ternarylogic_epi32(l1, l2, won3, 0xd4);
  return static_cast<__mmask16>(~_mm512_movepi32_mask(loses_twice));
}

}  // namespace
}  // namespace twofour
