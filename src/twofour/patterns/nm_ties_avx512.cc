#include <immintrin.h>

#include "ties_vector.h"

namespace twofour {
namespace {

struct Bytes {
  using Value = uint8_t;
  static __m512i all(uint32_t value) { return _mm512_set1_epi8(static_cast<char>(value)); }
  static __m512i size(__m512i x) { return _mm512_abs_epi8(x); }
  static __m512i smaller(__m512i x, __m512i y) { return _mm512_min_epu8(x, y); }
  static __m512i larger(__m512i x, __m512i y) { return _mm512_max_epu8(x, y); }
  static uint64_t tied(__m512i x, __m512i y) { return _mm512_mask_cmpeq_epi8_mask(_mm512_test_epi8_mask(x, x), x, y); }
};

struct Halves {
  using Value = uint16_t;
  static __m512i all(uint32_t value) { return _mm512_set1_epi16(static_cast<short>(value)); }
  static __m512i size(__m512i x) { return _mm512_abs_epi16(x); }
  static __m512i smaller(__m512i x, __m512i y) { return _mm512_min_epu16(x, y); }
  static __m512i larger(__m512i x, __m512i y) { return _mm512_max_epu16(x, y); }
  static uint64_t tied(__m512i x, __m512i y) { return _mm512_mask_cmpeq_epi16_mask(_mm512_test_epi16_mask(x, x), x, y); }
};

struct Words {
  using Value = uint32_t;
  static __m512i all(uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
  static __m512i size(__m512i x) { return _mm512_abs_epi32(x); }
  static __m512i smaller(__m512i x, __m512i y) { return _mm512_min_epu32(x, y); }
  static __m512i larger(__m512i x, __m512i y) { return _mm512_max_epu32(x, y); }
  static uint64_t tied(__m512i x, __m512i y) { return _mm512_mask_cmpeq_epi32_mask(_mm512_test_epi32_mask(x, x), x, y); }
};

template <class Of>
struct MagnitudeLanes : Of {
  using Value = typename Of::Value;
  using Vector = __m512i;
  static constexpr int kWidth = sizeof(Value), kCount = 64 / kWidth;
  static constexpr Swaps kSwaps{kWidth};

  static Vector load(const Value* values, Sign sign) {
    const Vector x = _mm512_loadu_si512(values);
    if (sign == Sign::kBit) return _mm512_and_si512(x, Of::all(0xffffffffu >> (32 - 8 * kWidth) >> 1));
    return sign == Sign::kComplement ? Of::size(x) : x;
  }
  static Vector swap(Vector x, const uint8_t (&bytes)[16]) {
    const __m128i order = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
    return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(order));
  }
  static Vector swap_neighbours(Vector x) { return swap(x, kSwaps.neighbours); }
  static Vector swap_pairs(Vector x) { return swap(x, kSwaps.pairs); }
  static int64_t equal_and_set(Vector low, Vector high) { return __builtin_popcountll(Of::tied(low, high)); }
};

}  // namespace

int64_t nm_ties_2x4_b8__avx512(const NmTies& a) { return run<MagnitudeLanes<Bytes>>(a); }
int64_t nm_ties_2x4_b16__avx512(const NmTies& a) { return run<MagnitudeLanes<Halves>>(a); }
int64_t nm_ties_2x4_b32__avx512(const NmTies& a) { return run<MagnitudeLanes<Words>>(a); }

}  // namespace twofour
