// Sixteen float32 values and what the fused kernels do with them, in AVX-512. Internal linkage: for instruction-set
// objects only.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12's own _mm512_undefined_ps
#endif
#include <immintrin.h>

#include <cstdint>

namespace {

struct Floats {
  using reg = __m512;
  static constexpr int width = 16;

  static __mmask16 first(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
  static reg zero() { return _mm512_setzero_ps(); }
  static reg all(float value) { return _mm512_set1_ps(value); }
  static reg load(const float* p) { return _mm512_loadu_ps(p); }
  static reg load(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(first(count), p); }
  // Loads that stay loads: without the barrier gcc folds them into each multiply-add that uses them, loading twice.
  static reg load_once(const float* p) {
    reg v = _mm512_loadu_ps(p);
    asm("" : "+v"(v));
    return v;
  }
  static reg spread_once(const float* p) {
    reg v = _mm512_set1_ps(*p);
    asm("" : "+v"(v));
    return v;
  }
  static void store(float* p, reg v) { _mm512_storeu_ps(p, v); }
  static void store(float* p, reg v, int64_t count) { _mm512_mask_storeu_ps(p, first(count), v); }
  static reg add(reg a, reg b) { return _mm512_add_ps(a, b); }
  static reg sub(reg a, reg b) { return _mm512_sub_ps(a, b); }
  static reg mul(reg a, reg b) { return _mm512_mul_ps(a, b); }
  static reg max(reg a, reg b) { return _mm512_max_ps(a, b); }
  static reg fma(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }
  static reg round(reg a) { return _mm512_roundscale_ps(a, 8); }
  // a * 2^n for integral n where x >= least (or is NaN), else 0.
  static reg scale_from(float least, reg x, reg a, reg n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, all(least), _CMP_NLT_UQ), a, n);
  }
  // `v` where the byte is not zero, else `other`; reads `count` bytes.
  static reg where_byte(const uint8_t* bytes, int64_t count, reg v, reg other) {
    const __m128i loaded = _mm_maskz_loadu_epi8(first(count), bytes);
    return _mm512_mask_mov_ps(other, _mm_test_epi8_mask(loaded, loaded), v);
  }
  static float sum(reg a) { return _mm512_reduce_add_ps(a); }
  static float largest(reg a) { return _mm512_reduce_max_ps(a); }

  static void transpose(reg (&t)[16]) {
    reg s[16];
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      const reg a = _mm512_unpacklo_ps(t[i], t[i + 1]), b = _mm512_unpackhi_ps(t[i], t[i + 1]);
      const reg c = _mm512_unpacklo_ps(t[i + 2], t[i + 3]), d = _mm512_unpackhi_ps(t[i + 2], t[i + 3]);
      s[i] = _mm512_shuffle_ps(a, c, 0x44);
      s[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
      s[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
      s[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {  // the 4 x 4 transpose of 128-bit lanes
      const reg a = _mm512_shuffle_f32x4(s[i], s[i + 4], 0x88), b = _mm512_shuffle_f32x4(s[i], s[i + 4], 0xdd);
      const reg c = _mm512_shuffle_f32x4(s[i + 8], s[i + 12], 0x88);
      const reg d = _mm512_shuffle_f32x4(s[i + 8], s[i + 12], 0xdd);
      t[i] = _mm512_shuffle_f32x4(a, c, 0x88);
      t[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
      t[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
      t[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
  }
};

}  // namespace
