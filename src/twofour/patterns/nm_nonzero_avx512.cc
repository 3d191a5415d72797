// Compares into mask registers: 16, 32 or 64 values an instruction.
#include <immintrin.h>

#include "nonzero_words.h"

namespace twofour {
namespace {

inline uint64_t nonzero_lanes(__m512i x, int8_t) { return _mm512_test_epi8_mask(x, x); }
inline uint64_t nonzero_lanes(__m512i x, int16_t) { return _mm512_test_epi16_mask(x, x); }
inline uint64_t nonzero_lanes(__m512i x, int32_t) { return _mm512_test_epi32_mask(x, x); }
inline uint64_t larger_lanes(__m512i x, __m512i y, int8_t) { return _mm512_cmpgt_epi8_mask(x, y); }
inline uint64_t larger_lanes(__m512i x, __m512i y, int16_t) { return _mm512_cmpgt_epi16_mask(x, y); }
inline uint64_t larger_lanes(__m512i x, __m512i y, int32_t) { return _mm512_cmpgt_epi32_mask(x, y); }
inline __m512i all(int64_t value, int8_t) { return _mm512_set1_epi8(static_cast<char>(value)); }
inline __m512i all(int64_t value, int16_t) { return _mm512_set1_epi16(static_cast<short>(value)); }
inline __m512i all(int64_t value, int32_t) { return _mm512_set1_epi32(static_cast<int>(value)); }

template <class Value>
NmNonzeroCounts run(const NmNonzero& a) {
  const __m512i magnitude = all(a.magnitude, Value{}), finite = all(a.finite, Value{});
  constexpr int kLanes = 64 / sizeof(Value);
  return nonzero_words<Value>(a, [=](const Value* values) {
    NonzeroWords w = {};
    for (int i = 0; i < 64; i += kLanes) {
      const __m512i x = _mm512_loadu_si512(values + i);
      const __m512i size = _mm512_and_si512(x, magnitude);
      const uint64_t nonzero = nonzero_lanes(size, Value{});
      w.nonzero |= nonzero << i;
      w.negative |= (nonzero_lanes(x, Value{}) & ~nonzero) << i;
      w.broken |= larger_lanes(size, finite, Value{}) << i;
    }
    return w;
  });
}

}  // namespace

NmNonzeroCounts nm_nonzero_b8__avx512(const NmNonzero& a) { return run<int8_t>(a); }
NmNonzeroCounts nm_nonzero_b16__avx512(const NmNonzero& a) { return run<int16_t>(a); }
NmNonzeroCounts nm_nonzero_b32__avx512(const NmNonzero& a) { return run<int32_t>(a); }

}  // namespace twofour
