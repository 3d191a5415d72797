// 2:4 by comparing each value with the three others of its group, two groups a vector.
#include <immintrin.h>

#include "keep_avx2.h"
#include "nm_mask.h"

namespace twofour {
namespace {

inline __m256i sort_key(__m256 score, bool absolute) {
  const __m256i bits = _mm256_castps_si256(_mm256_add_ps(score, _mm256_setzero_ps()));  // -0.0 becomes +0.0
  const __m256i magnitude_mask = _mm256_set1_epi32(0x7fffffff);
  if (absolute) return _mm256_and_si256(bits, magnitude_mask);
  return _mm256_xor_si256(bits, _mm256_and_si256(_mm256_srai_epi32(bits, 31), magnitude_mask));
}

// Byte i of the result is bit i of `bits`: the multiplication copies the byte to all eight, the mask picks one bit each.
inline uint64_t spread(int bits) {
  const uint64_t picked = (static_cast<uint64_t>(bits) * 0x0101010101010101ull) & 0x8040201008040201ull;
  return (picked + 0x7f7f7f7f7f7f7f7full) >> 7 & 0x0101010101010101ull;  // a non-zero byte carries into bit 7
}

inline void store_keep(uint8_t* keep, int bits, int lanes) {
  const uint64_t bytes = spread(bits);
  __builtin_memcpy(keep, &bytes, static_cast<size_t>(lanes));
}

template <bool kAbsolute>
bool run(const NmMask& a) {
  const int64_t count = a.groups * 4;
  const __m256i exponent = _mm256_set1_epi32(0x7f800000);
  __m256i bad = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 score = _mm256_loadu_ps(a.scores + i);
    const __m256i infinite = _mm256_and_si256(_mm256_castps_si256(score), exponent);
    bad = _mm256_or_si256(bad, _mm256_cmpeq_epi32(infinite, exponent));
    store_keep(a.keep + i, keep_two_of_four(sort_key(score, kAbsolute)), 8);
  }
  if (i < count) {  // one group left
    const __m256 score = _mm256_castps128_ps256(_mm_loadu_ps(a.scores + i));
    const __m256 clean = _mm256_insertf128_ps(score, _mm_setzero_ps(), 1);
    const __m256i infinite = _mm256_and_si256(_mm256_castps_si256(clean), exponent);
    bad = _mm256_or_si256(bad, _mm256_cmpeq_epi32(infinite, exponent));
    store_keep(a.keep + i, keep_two_of_four(sort_key(clean, kAbsolute)), 4);
  }
  return _mm256_testz_si256(bad, bad) != 0;
}

}  // namespace

bool nm_mask_2x4_f32__avx2(const NmMask& a) { return a.absolute ? run<true>(a) : run<false>(a); }

}  // namespace twofour
