// A row of scores becomes weights of one byte each, the greatest 255, in whole numbers but for one multiplication: every
// instruction set answers the same bits. Internal linkage.
#pragma once

#include "kernels/byte_dots.h"

namespace {

// How far a score is below its row's largest, in units of ln 2 / kSteps; from 16 ln 2 on its weight is 0.
constexpr float kSteps = 2048.0f, kLastStep = 32767.0f;

// 2^-x, 0 <= x < 1, by the polynomial of degree 2 with the least relative error (2.3e-3) that is 1 at 0, times 255 * 2^8.
constexpr uint32_t kOne = 255 * 256, kSlope = 43896, kBend = 11328;

// Steps below the largest, a NaN, as of what is hidden beside scores that are all alike, being the last one.
template <class V>
TWOFOUR_INLINE typename V::ints steps_below(typename V::reg largest, typename V::reg factor, const float* score) {
  return V::to_ints(V::min((largest - V::load_unaligned(score)) * factor, V::all(kLastStep)));
}

// The weight of so many steps, in 256ths: 255 * 256 * 2^-(steps / kSteps), below 2^16.
template <class V>
TWOFOUR_INLINE typename V::U weight_of(typename V::ints steps) {
  using U = typename V::U;
  const U t = (U)steps, whole = t >> 11, rest = (t & 2047) << 5;
  const U slope = kSlope - (rest * kBend >> 16);
  return (kOne - (rest * slope >> 16)) >> whole;
}

// Sums of a row's weights in bytes, and of what rounding took off or added, each for itself, in 256ths; spread over lanes.
template <class V>
struct ByteSums {
  typename V::ints weights{}, off{};
};

// Whether more than an eighth of a row's weight is off in bytes: many small weights beside a large one. It then has two of each.
constexpr float kMostOff = 256.0f / 8.0f;
inline bool is_lost(float weights, float off) { return off > kMostOff * weights; }

#if defined(TWOFOUR_SET_avx512)
// The same of 32 weights at once, as words, 128 more of each: the upper bytes are then nearest, the lower ones say how near.
TWOFOUR_INLINE __m512i weights_of(__m512i steps, __m512i more) {
  const __m512i t = _mm512_packus_epi32(steps, more);
  const __m512i rest = _mm512_slli_epi16(t, 5);
  const __m512i slope = _mm512_sub_epi16(_mm512_set1_epi16(static_cast<short>(kSlope)),
                                         _mm512_mulhi_epu16(rest, _mm512_set1_epi16(static_cast<short>(kBend))));
  const __m512i of_rest = _mm512_sub_epi16(_mm512_set1_epi16(static_cast<short>(kOne)), _mm512_mulhi_epu16(rest, slope));
  const __m512i found = _mm512_srlv_epi16(of_rest, _mm512_srli_epi16(t, 11));
  return _mm512_add_epi16(found, _mm512_set1_epi16(128));
}
#endif

// Scores [0, count), `count` a multiple of 4 V::width, to as many bytes from where they begin, and what is left of each weight,
// in 256ths around 128, to `rests`. Scores times `by` are in units of ln 2 / kSteps.
template <class V>
TWOFOUR_INLINE ByteSums<V> byte_weights(float* scores, uint8_t* rests, int64_t count, float most, float by) {
  const typename V::reg largest = V::all(most), factor = V::all(by);
  auto* to = reinterpret_cast<uint8_t*>(scores);
  ByteSums<V> total;
  for (int64_t j = 0; j < count; j += 4 * V::width) {
    typename V::ints four[4];
    TWOFOUR_UNROLL
    for (int i = 0; i < 4; ++i) four[i] = steps_below<V>(largest, factor, scores + j + i * V::width);
#if defined(TWOFOUR_SET_avx512)
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i low = weights_of(four[0], four[1]), high = weights_of(four[2], four[3]), below = _mm512_set1_epi16(255);
    const __m512i mixed = _mm512_packus_epi16(_mm512_srli_epi16(low, 8), _mm512_srli_epi16(high, 8));
    const __m512i rest = _mm512_packus_epi16(_mm512_and_si512(low, below), _mm512_and_si512(high, below));
    const __m512i bytes = _mm512_permutexvar_epi32(order, mixed);
    _mm512_storeu_si512(to + j, bytes);
    _mm512_storeu_si512(rests + j, _mm512_permutexvar_epi32(order, rest));
    total.weights = dot_bytes<V, true>(total.weights, bytes, _mm512_set1_epi8(1));
    total.off = V::add(total.off, _mm512_sad_epu8(rest, _mm512_set1_epi8(-128)));
#else
    typename V::ints rest[4];
    TWOFOUR_UNROLL
    for (int i = 0; i < 4; ++i) {
      const typename V::U nearest = weight_of<V>(four[i]) + 128;
      rest[i] = (typename V::ints)(nearest & 255), four[i] = (typename V::ints)(nearest >> 8);
      const auto off = (typename V::I)rest[i] - 128, sign = off >> 31;
      total.weights = V::add(total.weights, four[i]);
      total.off = V::add(total.off, (typename V::ints)((off ^ sign) - sign));
    }
    V::store_four(to + j, four);
    V::store_four(rests + j, rest);
#endif
  }
  return total;
}

// Makes of the nearest bytes of weights, and what is left around 128, two bytes of each weight; returns the sum of them.
inline float two_bytes(uint8_t* upper, uint8_t* lower, int64_t count) {
  int32_t high = 0, low = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto rest = static_cast<uint8_t>(lower[i] ^ 128);
    lower[i] = rest, upper[i] = static_cast<uint8_t>(upper[i] - (rest >> 7));
    high += upper[i], low += rest;
  }
  return 256.0f * static_cast<float>(high) + static_cast<float>(low);
}

// The largest lane of each of R vectors, and the sums of lanes of whole numbers below 2^24 in all, which floats hold exactly.
template <class V, int R>
TWOFOUR_INLINE void largest_lanes(const typename V::reg (&v)[R], float* found) {
#if defined(TWOFOUR_SET_avx512)
  if constexpr (R == 4) {
    const __m512 a = _mm512_max_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const __m512 b = _mm512_max_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const __m512 c = _mm512_max_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    const __m256 d = _mm256_max_ps(_mm512_castps512_ps256(c), _mm512_extractf32x8_ps(c, 1));
    _mm_storeu_ps(found, _mm_max_ps(_mm256_castps256_ps128(d), _mm256_extractf128_ps(d, 1)));
    return;
  }
#endif
  for (int r = 0; r < R; ++r) found[r] = V::largest(v[r]);
}
template <class V, int R>
TWOFOUR_INLINE void sums_of_lanes(const typename V::ints (&v)[R], float* found) {
#if defined(TWOFOUR_SET_avx512)
  if constexpr (R == 4) {
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    const __m512i c = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    const __m256i d = _mm256_add_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
    const __m128i e = _mm_add_epi32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));
    _mm_storeu_ps(found, _mm_cvtepi32_ps(e));
    return;
  }
#endif
  for (int r = 0; r < R; ++r) found[r] = V::sum(V::to_real(v[r]));
}

}  // namespace
