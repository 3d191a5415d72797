// The AVX2 row. vpmaddubsw would saturate (255 * 127 * 2 > 32767), so activations and weights are widened to 16 bits:
// the permute that picks the activations writes the zeros between them, at no cost.
#include "kernels/nm_matmul/nm_matmul.h"
#include "row_octets.h"

namespace {

struct Vec : OctetLanes {
  // The low bytes of the eight dwords.
  static TWOFOUR_INLINE int64_t low_bytes(ints v) {
    const ints low = _mm256_shuffle_epi8(v, _mm256_set1_epi32(0x0c080400));
    const __m128i two = _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    return _mm_cvtsi128_si64(two);
  }
  static TWOFOUR_INLINE void store_x(ints q, uint8_t* to, int64_t k, int64_t stride) {
    const int64_t bytes = low_bytes(q);
    __builtin_memcpy(to + k / 8 * stride, &bytes, 8);
  }

  static TWOFOUR_INLINE void store_bytes(uint8_t* p, ints v, int64_t count) {
    const int64_t bytes = low_bytes(v);
    __builtin_memcpy(p, &bytes, static_cast<size_t>(count));
  }

  // 16-bit words: the first and the second value of each group. A control byte of 0x80 writes a zero.
  struct Octet {
    ints first, second, pick_first, pick_second;
  };
  static TWOFOUR_INLINE Octet octet(const uint8_t* p, ints meta) {
    const ints values = load_ints(p), low = _mm256_set1_epi32(0x00030003);
    const ints base = _mm256_set1_epi32(static_cast<int>(0x80048000u));
    return {_mm256_srai_epi16(_mm256_slli_epi16(values, 8), 8), _mm256_srai_epi16(values, 8),
            _mm256_or_si256(_mm256_and_si256(meta, low), base),
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(meta, 8), low), base)};
  }
  static TWOFOUR_INLINE ints broadcast8(const uint8_t* p) {
    return _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static TWOFOUR_INLINE ints dot(ints sum, ints x, const Octet& w) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(x, w.pick_first), w.first));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(x, w.pick_second), w.second));
  }
};

}  // namespace

namespace twofour {

int64_t nm_matmul_2x4_int8_rows__avx2__workspace(const Matmul& a) { return row_octets_workspace<Vec>(a); }
void nm_matmul_2x4_int8_rows__avx2(const Matmul& a) { row_octets<Vec>(a); }

}  // namespace twofour
