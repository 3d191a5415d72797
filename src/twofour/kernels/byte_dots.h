// Four bytes of inputs, unsigned, times four of weights, signed, added to each lane of int32. The sums are exact.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>

#include "kernels/whole_lanes.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

// An instruction of VNNI, its sums first: of the builtins gcc 12 copies and stores the sums in every round of a loop.
#if defined(TWOFOUR_SET_avx512_vnni)
#define TWOFOUR_VNNI(instruction, sum, x, w) asm(instruction " %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w))
#elif defined(TWOFOUR_SET_avx_vnni)
#define TWOFOUR_VNNI(instruction, sum, x, w) asm("%{vex%} " instruction " %2, %1, %0" : "+x"(sum) : "x"(x), "x"(w))
#endif

namespace {

#if defined(TWOFOUR_VNNI)
constexpr bool kDotsAreInstructions = true;
#else
constexpr bool kDotsAreInstructions = false;
#endif

// Sets in which `sums` sums are kept apart until the end. Two dots start in a cycle, and a sum waits 4 or 5 for the one before
// it; where additions make a sum it waits one, and registers are needed for what is added.
constexpr int sets_of_sums(int sums) {
  int sets = 1;
  while (kDotsAreInstructions && 2 * sets * sums <= 8) sets *= 2;
  return sets;
}

// `narrow`: no input times a weight reaches 2^14, so that sums of two products fit 16 bits. Else bytes are widened where no
// instruction multiplies them: vpmaddubsw would saturate (255 * 127 * 2 > 32767).
template <class V, bool narrow>
TWOFOUR_INLINE typename V::ints dot_bytes(typename V::ints sum, typename V::ints x, typename V::ints w) {
#if defined(TWOFOUR_VNNI)
  TWOFOUR_VNNI("vpdpbusd", sum, x, w);
  return sum;
#elif defined(TWOFOUR_SET_avx2) && !defined(TWOFOUR_SET_avx512)
  const auto inputs = (__m256i)x, weights = (__m256i)w;
  if constexpr (narrow)
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(inputs, weights), _mm256_set1_epi16(1)));
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(inputs, _mm256_set1_epi16(0xff)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(weights, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(inputs, 8), _mm256_srai_epi16(weights, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
#elif defined(__SSE2__) && !defined(TWOFOUR_SET_avx512)
  // What every x86-64 has: multiplied as words, for SSE2 has no product of dwords.
  const auto inputs = (__m128i)x, weights = (__m128i)w;
  const __m128i even = _mm_madd_epi16(_mm_and_si128(inputs, _mm_set1_epi16(0xff)), _mm_srai_epi16(_mm_slli_epi16(weights, 8), 8));
  const __m128i odd = _mm_madd_epi16(_mm_srli_epi16(inputs, 8), _mm_srai_epi16(weights, 8));
  return V::add(sum, (typename V::ints)_mm_add_epi32(even, odd));
#else
  const auto inputs = (typename V::U)x;
  const auto weights = (typename V::I)w;
  typename V::I products = (typename V::I)(inputs >> 24) * (weights >> 24);
  TWOFOUR_UNROLL
  for (int e = 0; e < 3; e++) products += (typename V::I)(inputs >> 8 * e & 0xff) * (weights << (24 - 8 * e) >> 24);
  return V::add(sum, (typename V::ints)products);
#endif
}

}  // namespace
