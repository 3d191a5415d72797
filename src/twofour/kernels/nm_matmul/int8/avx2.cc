// The AVX2 row. vpmaddubsw would saturate (255 * 127 * 2 > 32767), so activations and weights are widened to 16 bits:
// the permute that picks the activations writes the zeros between them, at no cost.
#include <immintrin.h>

#include "row_octets.h"

namespace {

struct Vec {
  using reg = __m256;
  using ints = __m256i;
  static constexpr int width = 8;
  static constexpr int row_halves = 1, row_tokens = 4, row_sums = 8;

  static ints mask(int64_t count) {
    const ints lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count > width ? width : count)), lanes);
  }
  static reg zero() { return _mm256_setzero_ps(); }
  static reg set(float v) { return _mm256_set1_ps(v); }
  static reg load_aligned(const float* p) { return _mm256_load_ps(p); }
  static reg load_x(const float* p, int64_t count) {
    return count >= width ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, mask(count));
  }
  static reg load_x(const uint16_t* p, int64_t count) {
    uint16_t part[width] = {};
    if (count < width) __builtin_memcpy(part, p, static_cast<size_t>(count) * 2);
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(count < width ? part : p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
  static reg mul(reg a, reg b) { return _mm256_mul_ps(a, b); }
  static reg times_zero(reg v, reg sum) { return _mm256_fmadd_ps(v, zero(), sum); }
  static reg min(reg a, reg b) { return _mm256_min_ps(a, b); }
  static reg max(reg a, reg b) { return _mm256_max_ps(a, b); }
  static __m128 halves(__m128 (*f)(__m128, __m128), reg v) {
    __m128 h = f(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    h = f(h, _mm_movehl_ps(h, h));
    return f(h, _mm_movehdup_ps(h));
  }
  static float least(reg v) { return _mm_cvtss_f32(halves([](__m128 a, __m128 b) { return _mm_min_ps(a, b); }, v)); }
  static float most(reg v) { return _mm_cvtss_f32(halves([](__m128 a, __m128 b) { return _mm_max_ps(a, b); }, v)); }
  static float sum(reg v) { return _mm_cvtss_f32(halves([](__m128 a, __m128 b) { return _mm_add_ps(a, b); }, v)); }
  static int32_t nearest(float v) { return _mm_cvtss_si32(_mm_set_ss(v)); }

  // clamp(nearest even(v * factor) + zero, low, high); a NaN becomes `low`.
  struct Rounder {
    reg factor, least, most;
    ints zero;
    TWOFOUR_INLINE Rounder(float f, int32_t z, int low, int high)
        : factor(_mm256_set1_ps(f)),
          least(_mm256_set1_ps(static_cast<float>(low) - static_cast<float>(z))),
          most(_mm256_set1_ps(static_cast<float>(high) - static_cast<float>(z))),
          zero(_mm256_set1_epi32(z)) {}
    TWOFOUR_INLINE ints operator()(reg v) const {
      const reg inside = _mm256_min_ps(_mm256_max_ps(_mm256_mul_ps(v, factor), least), most);
      return _mm256_add_epi32(_mm256_cvtps_epi32(inside), zero);
    }
  };
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

  static ints no_ints() { return _mm256_setzero_si256(); }
  static ints load_ints(const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store_ints(int32_t* p, ints v) { _mm256_store_si256(reinterpret_cast<__m256i*>(p), v); }
  static ints add(ints a, ints b) { return _mm256_add_epi32(a, b); }
  static ints minus_product(ints a, ints b, int32_t c) {
    return _mm256_sub_epi32(a, _mm256_mullo_epi32(b, _mm256_set1_epi32(c)));
  }
  static reg to_real(ints v) { return _mm256_cvtepi32_ps(v); }

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
  static ints next_index(ints meta) { return _mm256_srli_epi32(meta, 2); }
  static TWOFOUR_INLINE ints broadcast8(const uint8_t* p) {
    return _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static TWOFOUR_INLINE ints dot(ints sum, ints x, const Octet& w) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(x, w.pick_first), w.first));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(x, w.pick_second), w.second));
  }
  // Forced inline: gcc 12 takes a function that only prefetches for one without effect and drops its calls.
  static TWOFOUR_INLINE void prefetch(const uint8_t* p, int64_t near, int64_t far) {
    _mm_prefetch(reinterpret_cast<const char*>(p) + near, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(p) + far, _MM_HINT_T1);
  }

  static TWOFOUR_INLINE void store_f32(float* p, reg v, int64_t count) {
    if (count >= width) return _mm256_storeu_ps(p, v);
    _mm256_maskstore_ps(p, mask(count), v);
  }
  static TWOFOUR_INLINE void store_bf16(uint16_t* p, reg v, int64_t count) {
    const ints bits = _mm256_castps_si256(v);
    const ints odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const ints even = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const ints nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const ints high = _mm256_srli_epi32(_mm256_blendv_epi8(even, _mm256_set1_epi32(0x7fc00000), nan), 16);
    const __m128i eight = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    __builtin_memcpy(p, &eight, static_cast<size_t>(count * 2));
  }
  static TWOFOUR_INLINE void store_bytes(uint8_t* p, ints v, int64_t count) {
    const int64_t bytes = low_bytes(v);
    __builtin_memcpy(p, &bytes, static_cast<size_t>(count));
  }
};

}  // namespace

namespace twofour {

int64_t nm_matmul_2x4_int8_rows__avx2__workspace(const NmMatmul& a) { return row_octets_workspace<Vec>(a); }
void nm_matmul_2x4_int8_rows__avx2(const NmMatmul& a) { row_octets<Vec>(a); }

}  // namespace twofour
