// Sixteen float32 values and what the fused kernels do with them, in AVX-512. Internal linkage: for instruction-set
// objects only.
#pragma once

#include <cstdint>

#include "lanes_avx512.h"

namespace {

struct Floats : Lanes {
  static reg all(float value) { return _mm512_set1_ps(value); }
  static reg load(const float* p) { return _mm512_loadu_ps(p); }
  static reg load(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(mask(count), p); }
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
  static void store(float* p, reg v, int64_t count) { _mm512_mask_storeu_ps(p, mask(count), v); }
  // bfloat16: the upper half of a float. Stores round to nearest even, a NaN stays one.
  static reg widened(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
  static reg load(const uint16_t* p) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static reg load(const uint16_t* p, int64_t count) { return widened(_mm256_maskz_loadu_epi16(mask(count), p)); }
  static __m256i narrowed(reg v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i even = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i kept = _mm512_mask_mov_epi32(even, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
  }
  static void store(uint16_t* p, reg v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed(v)); }
  static void store(uint16_t* p, reg v, int64_t count) { _mm256_mask_storeu_epi16(p, mask(count), narrowed(v)); }
  static reg sub(reg a, reg b) { return _mm512_sub_ps(a, b); }
  static reg mul(reg a, reg b) { return _mm512_mul_ps(a, b); }
  static reg max(reg a, reg b) { return _mm512_max_ps(a, b); }
  static reg round(reg a) { return _mm512_roundscale_ps(a, 8); }
  // a * 2^n for integral n where x >= least (or is NaN), else 0.
  static reg scale_from(float least, reg x, reg a, reg n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, all(least), _CMP_NLT_UQ), a, n);
  }
  // `v` where the byte is not zero, else `other`; reads `count` bytes.
  static reg where_byte(const uint8_t* bytes, int64_t count, reg v, reg other) {
    const __m128i loaded = _mm_maskz_loadu_epi8(mask(count), bytes);
    return _mm512_mask_mov_ps(other, _mm_test_epi8_mask(loaded, loaded), v);
  }
  static float sum(reg a) { return _mm512_reduce_add_ps(a); }
  static float largest(reg a) { return _mm512_reduce_max_ps(a); }
};

}  // namespace
