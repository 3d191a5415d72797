// Which two of every four sort keys are kept, two groups a vector: shared by the mask and the compress kernels.
// Only for files compiled for AVX2; internal linkage, so each carries its own copy.
#pragma once

#include <immintrin.h>

namespace twofour {
namespace {

// All ones in the lanes that lose to `other`: it is larger, or equal and of lower index (`lower` marks those lanes).
inline __m256i loses(__m256i other, __m256i key, __m256i lower) {
  const __m256i equal = _mm256_and_si256(_mm256_cmpeq_epi32(other, key), lower);
  return _mm256_or_si256(_mm256_cmpgt_epi32(other, key), equal);
}

// Eight bits, one a lane: kept = loses to at most one of the three others.
inline int keep_two_of_four(__m256i key) {
  const __m256i lower1 = _mm256_setr_epi32(0, 0, 0, -1, 0, 0, 0, -1);
  const __m256i lower2 = _mm256_setr_epi32(0, 0, -1, -1, 0, 0, -1, -1);
  const __m256i lower3 = _mm256_setr_epi32(0, -1, -1, -1, 0, -1, -1, -1);
  const __m256i l1 = loses(_mm256_shuffle_epi32(key, 0x39), key, lower1);
  const __m256i l2 = loses(_mm256_shuffle_epi32(key, 0x4e), key, lower2);
  const __m256i l3 = loses(_mm256_shuffle_epi32(key, 0x93), key, lower3);
  const __m256i twice = _mm256_or_si256(_mm256_and_si256(l1, l2), _mm256_and_si256(_mm256_or_si256(l1, l2), l3));
  return ~_mm256_movemask_ps(_mm256_castsi256_ps(twice)) & 0xff;
}

}  // namespace
}  // namespace twofour
