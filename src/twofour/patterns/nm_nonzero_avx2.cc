// Compares into vectors, narrowed to a byte a value: 32 values a movemask.
#include <immintrin.h>

#include "nonzero_words.h"

namespace twofour {
namespace {

// sizeof(Value) vectors of comparisons, all ones or all zeros a lane, become one bit a lane.
inline uint64_t lanes(const __m256i (&x)[1]) { return static_cast<uint32_t>(_mm256_movemask_epi8(x[0])); }
inline uint64_t lanes(const __m256i (&x)[2]) {
  const __m256i bytes[1] = {_mm256_permute4x64_epi64(_mm256_packs_epi16(x[0], x[1]), 0xd8)};  // packs within halves
  return lanes(bytes);
}
inline uint64_t lanes(const __m256i (&x)[4]) {
  uint64_t bits = 0;
  for (int i = 0; i < 4; ++i)
    bits |= static_cast<uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(x[i]))) << (8 * i);
  return bits;
}

inline __m256i equal(__m256i x, __m256i y, int8_t) { return _mm256_cmpeq_epi8(x, y); }
inline __m256i equal(__m256i x, __m256i y, int16_t) { return _mm256_cmpeq_epi16(x, y); }
inline __m256i equal(__m256i x, __m256i y, int32_t) { return _mm256_cmpeq_epi32(x, y); }
inline __m256i larger(__m256i x, __m256i y, int8_t) { return _mm256_cmpgt_epi8(x, y); }
inline __m256i larger(__m256i x, __m256i y, int16_t) { return _mm256_cmpgt_epi16(x, y); }
inline __m256i larger(__m256i x, __m256i y, int32_t) { return _mm256_cmpgt_epi32(x, y); }
inline __m256i all(int64_t value, int8_t) { return _mm256_set1_epi8(static_cast<char>(value)); }
inline __m256i all(int64_t value, int16_t) { return _mm256_set1_epi16(static_cast<short>(value)); }
inline __m256i all(int64_t value, int32_t) { return _mm256_set1_epi32(static_cast<int>(value)); }

template <class Value>
NmNonzeroCounts run(const NmNonzero& a) {
  const __m256i magnitude = all(a.magnitude, Value{}), finite = all(a.finite, Value{});
  const __m256i none = _mm256_setzero_si256();
  constexpr int kVectors = sizeof(Value), kLanes = 32 / kVectors;
  return nonzero_words<Value>(a, [=](const Value* values) {
    NonzeroWords w = {};
    for (int i = 0; i < 64; i += 32) {
      __m256i zero[kVectors], negative[kVectors], broken[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i + v * kLanes));
        const __m256i size = _mm256_and_si256(x, magnitude);
        zero[v] = equal(size, none, Value{});
        negative[v] = _mm256_andnot_si256(equal(x, none, Value{}), zero[v]);
        broken[v] = larger(size, finite, Value{});
      }
      w.nonzero |= (~lanes(zero) & 0xffffffffu) << i;
      w.negative |= lanes(negative) << i;
      w.broken |= lanes(broken) << i;
    }
    return w;
  });
}

}  // namespace

NmNonzeroCounts nm_nonzero_b8__avx2(const NmNonzero& a) { return run<int8_t>(a); }
NmNonzeroCounts nm_nonzero_b16__avx2(const NmNonzero& a) { return run<int16_t>(a); }
NmNonzeroCounts nm_nonzero_b32__avx2(const NmNonzero& a) { return run<int32_t>(a); }

}  // namespace twofour
