#include <immintrin.h>

#include "ties_vector.h"

namespace twofour {
namespace {

struct Bytes {
  using Value = uint8_t;
  static __m256i all(uint32_t value) { return _mm256_set1_epi8(static_cast<char>(value)); }
  static __m256i size(__m256i x) { return _mm256_abs_epi8(x); }
  static __m256i smaller(__m256i x, __m256i y) { return _mm256_min_epu8(x, y); }
  static __m256i larger(__m256i x, __m256i y) { return _mm256_max_epu8(x, y); }
  static __m256i equal(__m256i x, __m256i y) { return _mm256_cmpeq_epi8(x, y); }
};

struct Halves {
  using Value = uint16_t;
  static __m256i all(uint32_t value) { return _mm256_set1_epi16(static_cast<short>(value)); }
  static __m256i size(__m256i x) { return _mm256_abs_epi16(x); }
  static __m256i smaller(__m256i x, __m256i y) { return _mm256_min_epu16(x, y); }
  static __m256i larger(__m256i x, __m256i y) { return _mm256_max_epu16(x, y); }
  static __m256i equal(__m256i x, __m256i y) { return _mm256_cmpeq_epi16(x, y); }
};

struct Words {
  using Value = uint32_t;
  static __m256i all(uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
  static __m256i size(__m256i x) { return _mm256_abs_epi32(x); }
  static __m256i smaller(__m256i x, __m256i y) { return _mm256_min_epu32(x, y); }
  static __m256i larger(__m256i x, __m256i y) { return _mm256_max_epu32(x, y); }
  static __m256i equal(__m256i x, __m256i y) { return _mm256_cmpeq_epi32(x, y); }
};

template <class Of>
struct MagnitudeLanes : Of {
  using Value = typename Of::Value;
  using Vector = __m256i;
  static constexpr int kWidth = sizeof(Value), kCount = 32 / kWidth;
  static constexpr Swaps kSwaps{kWidth};

  static Vector load(const Value* values, Sign sign) {
    const Vector x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
    if (sign == Sign::kBit) return _mm256_and_si256(x, Of::all(0xffffffffu >> (32 - 8 * kWidth) >> 1));
    return sign == Sign::kComplement ? Of::size(x) : x;
  }
  static Vector swap(Vector x, const uint8_t (&bytes)[16]) {
    const __m128i order = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
    return _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(order));
  }
  static Vector swap_neighbours(Vector x) { return swap(x, kSwaps.neighbours); }
  static Vector swap_pairs(Vector x) { return swap(x, kSwaps.pairs); }
  static int64_t equal_and_set(Vector low, Vector high) {
    const Vector tied = _mm256_andnot_si256(Of::equal(low, _mm256_setzero_si256()), Of::equal(low, high));
    return __builtin_popcount(static_cast<uint32_t>(_mm256_movemask_epi8(tied))) / kWidth;
  }
};

}  // namespace

int64_t nm_ties_2x4_b8__avx2(const NmTies& a) { return run<MagnitudeLanes<Bytes>>(a); }
int64_t nm_ties_2x4_b16__avx2(const NmTies& a) { return run<MagnitudeLanes<Halves>>(a); }
int64_t nm_ties_2x4_b32__avx2(const NmTies& a) { return run<MagnitudeLanes<Words>>(a); }

}  // namespace twofour
