// The vectors of few_panels.h: quarters of 16 bytes, each two inputs of two tokens. Those of 32 bytes are of every set with AVX2:
// with AVX-512 they serve tails, of which one of 64 would be padding. Internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "native/compiler.h"

namespace {

// Eight floats: two inputs of four tokens.
struct FewHalf {
  using reg = __m256;
  using Weights = __m256d;  // four pairs
  static constexpr int width = 8, quarters = 2, tokens = 4, pairs = 4;
#if defined(TWOFOUR_SET_avx512)
  static constexpr int sums = 16;  // registers
#else
  static constexpr int sums = 8;
#endif
  struct Places {};

  static TWOFOUR_INLINE __m256i mask(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static TWOFOUR_INLINE reg zero() { return _mm256_setzero_ps(); }
  static TWOFOUR_INLINE reg load(const float* p) { return _mm256_load_ps(p); }
  static TWOFOUR_INLINE void store(float* p, reg v) { _mm256_store_ps(p, v); }
  static TWOFOUR_INLINE reg load(const float* p, int64_t count) {
    return count >= width ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, mask(count));
  }
  static TWOFOUR_INLINE void store(float* p, reg v, int64_t count) {
    if (count >= width) _mm256_storeu_ps(p, v);
    else _mm256_maskstore_ps(p, mask(count), v);
  }
  static TWOFOUR_INLINE reg fma(reg w, const float* x, reg sum) { return _mm256_fmadd_ps(w, _mm256_load_ps(x), sum); }
  template <int of>
  static TWOFOUR_INLINE reg shuffle(reg a, reg b) {
    return _mm256_shuffle_ps(a, b, of);
  }
  // Quarters of as many vectors, transposed as a square.
  static TWOFOUR_INLINE void transpose(const reg* from, reg* to) {
    to[0] = _mm256_permute2f128_ps(from[0], from[1], 0x20);
    to[1] = _mm256_permute2f128_ps(from[0], from[1], 0x31);
  }
  static TWOFOUR_INLINE Weights load_pairs(const char* p) {
    Weights w = _mm256_loadu_pd(reinterpret_cast<const double*>(p));
    asm("" : "+x"(w));  // else every permute loads it
    return w;
  }
  template <int pair>
  static TWOFOUR_INLINE reg broadcast(Weights w, const Places&) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(w, pair * 0x55));
  }
};

#if defined(TWOFOUR_SET_avx512)
// Sixteen floats: two inputs of eight tokens.
struct FewWhole {
  using reg = __m512;
  using Weights = __m512d;  // eight pairs
  static constexpr int width = 16, quarters = 4, tokens = 8, pairs = 8, sums = 16;
  struct Places {
    __m512i pair[8];
    TWOFOUR_INLINE Places() {
      TWOFOUR_UNROLL
      for (int i = 0; i < 8; i++) {
        pair[i] = _mm512_set1_epi64(i);
        asm("" : "+v"(pair[i]));  // kept in a register
      }
    }
  };

  static TWOFOUR_INLINE __mmask16 mask(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
  static TWOFOUR_INLINE reg zero() { return _mm512_setzero_ps(); }
  static TWOFOUR_INLINE reg load(const float* p) { return _mm512_load_ps(p); }
  static TWOFOUR_INLINE void store(float* p, reg v) { _mm512_store_ps(p, v); }
  static TWOFOUR_INLINE reg load(const float* p, int64_t count) {
    return count >= width ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(mask(count), p);
  }
  static TWOFOUR_INLINE void store(float* p, reg v, int64_t count) {
    if (count >= width) _mm512_storeu_ps(p, v);
    else _mm512_mask_storeu_ps(p, mask(count), v);
  }
  static TWOFOUR_INLINE reg fma(reg w, const float* x, reg sum) { return _mm512_fmadd_ps(w, _mm512_load_ps(x), sum); }
  template <int of>
  static TWOFOUR_INLINE reg shuffle(reg a, reg b) {
    return _mm512_shuffle_ps(a, b, of);
  }
  static TWOFOUR_INLINE void transpose(const reg* from, reg* to) {
    const reg a = _mm512_shuffle_f32x4(from[0], from[1], 0x44), b = _mm512_shuffle_f32x4(from[2], from[3], 0x44);
    const reg c = _mm512_shuffle_f32x4(from[0], from[1], 0xee), d = _mm512_shuffle_f32x4(from[2], from[3], 0xee);
    to[0] = _mm512_shuffle_f32x4(a, b, 0x88);
    to[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
    to[2] = _mm512_shuffle_f32x4(c, d, 0x88);
    to[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
  static TWOFOUR_INLINE Weights load_pairs(const char* p) {
    Weights w = _mm512_loadu_pd(p);
    asm("" : "+v"(w));  // else every permute loads it
    return w;
  }
  template <int pair>
  static TWOFOUR_INLINE reg broadcast(Weights w, const Places& places) {
    return _mm512_castpd_ps(_mm512_permutexvar_pd(places.pair[pair], w));
  }
};
#endif

}  // namespace
