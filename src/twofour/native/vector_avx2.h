// Eight float32 values and what the fused kernels do with them, in AVX2 with FMA. Internal linkage: for
// instruction-set objects only.
#pragma once

#include <cstdint>

#include "lanes_avx2.h"

namespace {

struct Floats : Lanes {
  static reg all(float value) { return _mm256_set1_ps(value); }
  static reg load(const float* p) { return _mm256_loadu_ps(p); }
  static reg load(const float* p, int64_t count) { return _mm256_maskload_ps(p, mask(count)); }
  static reg load_once(const float* p) {
    reg v = _mm256_loadu_ps(p);
    asm("" : "+x"(v));
    return v;
  }
  static reg spread_once(const float* p) { return _mm256_broadcast_ss(p); }
  static void store(float* p, reg v) { _mm256_storeu_ps(p, v); }
  static void store(float* p, reg v, int64_t count) { _mm256_maskstore_ps(p, mask(count), v); }
  // bfloat16: the upper half of a float. Stores round to nearest even, a NaN stays one.
  static reg widened(__m128i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)); }
  static reg load(const uint16_t* p) { return widened(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static reg load(const uint16_t* p, int64_t count) {
    if (count >= width) return load(p);
    alignas(16) uint16_t some[width] = {};
    for (int64_t i = 0; i < count; ++i) some[i] = p[i];
    return load(some);
  }
  static void store(uint16_t* p, reg v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i even = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i kept = _mm256_srli_epi32(_mm256_blendv_epi8(even, quiet, nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(kept, kept), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  static void store(uint16_t* p, reg v, int64_t count) {
    if (count >= width) return store(p, v);
    alignas(16) uint16_t all[width];
    store(all, v);
    for (int64_t i = 0; i < count; ++i) p[i] = all[i];
  }
  static reg sub(reg a, reg b) { return _mm256_sub_ps(a, b); }
  static reg mul(reg a, reg b) { return _mm256_mul_ps(a, b); }
  static reg max(reg a, reg b) { return _mm256_max_ps(a, b); }
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
};

}  // namespace
