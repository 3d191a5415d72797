// The AVX2 row. vpmaddubsw would saturate (255 * 127 * 2 > 32767), so activations and weights are widened to 16 bits:
// the permute that picks the activations writes the zeros between them, at no cost.
#include "kernels/nm_matmul/nm_matmul.h"
#include "row_octets.h"

namespace {

struct Vec : WholeLanes {
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
