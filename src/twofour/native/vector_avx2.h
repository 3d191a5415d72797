// Eight float32 values and what the fused kernels do with them, in AVX2 with FMA. Internal linkage: for
// instruction-set objects only.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

struct Floats {
  using reg = __m256;
  static constexpr int width = 8;

  static __m256i first(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static reg zero() { return _mm256_setzero_ps(); }
  static reg all(float value) { return _mm256_set1_ps(value); }
  static reg load(const float* p) { return _mm256_loadu_ps(p); }
  static reg load(const float* p, int64_t count) { return _mm256_maskload_ps(p, first(count)); }
  static reg load_once(const float* p) {
    reg v = _mm256_loadu_ps(p);
    asm("" : "+x"(v));
    return v;
  }
  static reg spread_once(const float* p) { return _mm256_broadcast_ss(p); }
  static void store(float* p, reg v) { _mm256_storeu_ps(p, v); }
  static void store(float* p, reg v, int64_t count) { _mm256_maskstore_ps(p, first(count), v); }
  static reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
  static reg sub(reg a, reg b) { return _mm256_sub_ps(a, b); }
  static reg mul(reg a, reg b) { return _mm256_mul_ps(a, b); }
  static reg max(reg a, reg b) { return _mm256_max_ps(a, b); }
  static reg fma(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }
  static reg round(reg a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // a * 2^n for integral n in [-126, 127] where x >= least (or is NaN), else 0.
  static reg scale_from(float least, reg x, reg a, reg n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    const reg scaled = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
    return _mm256_and_ps(_mm256_cmp_ps(x, all(least), _CMP_NLT_UQ), scaled);
  }
  // `v` where the byte is not zero, else `other`; reads `count` bytes.
  static reg where_byte(const uint8_t* bytes, int64_t count, reg v, reg other) {
    uint64_t word = 0;
    for (int64_t i = 0; i < count; ++i) word |= uint64_t{bytes[i]} << (8 * i);
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(word)));
    return _mm256_blendv_ps(v, other, _mm256_castsi256_ps(_mm256_cmpeq_epi32(wide, _mm256_setzero_si256())));
  }
  static float sum(reg a) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
  }
  static float largest(reg a) {
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
  }

  static void transpose(reg (&t)[8]) {
    reg s[8];
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      const reg a = _mm256_unpacklo_ps(t[i], t[i + 1]), b = _mm256_unpackhi_ps(t[i], t[i + 1]);
      const reg c = _mm256_unpacklo_ps(t[i + 2], t[i + 3]), d = _mm256_unpackhi_ps(t[i + 2], t[i + 3]);
      s[i] = _mm256_shuffle_ps(a, c, 0x44);
      s[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
      s[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
      s[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      t[i] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x20);
      t[i + 4] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x31);
    }
  }
};

}  // namespace
