// The vector type of both AVX-512 files. Internal linkage.
#pragma once

#include "native/lanes_avx512.h"

namespace {

struct Vec : Lanes {
  static constexpr int panel_sums = 16;
  static constexpr int row_halves = 2, row_tokens = 8, row_sums = 16;

  // bfloat16 in memory as the upper halves of floats, and back.
  static reg widened(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
  static ireg uppers(reg v) { return _mm512_srli_epi32(_mm512_castps_si512(v), 16); }
  static reg load_upper(const char* p) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static reg load_upper_partial(const char* p, int64_t count) {
    return widened(_mm256_maskz_loadu_epi16(mask(count), p));
  }
  static void store_upper(char* p, reg v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(uppers(v)));
  }
  static void store_upper_partial(char* p, reg v, int64_t count) {
    _mm512_mask_cvtepi32_storeu_epi16(p, mask(count), uppers(v));
  }

  // Dwords that hold two bfloat16 each, as two vectors of floats.
  static reg lower(ireg v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
  static reg upper(ireg v) { return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(-65536))); }
  static TWOFOUR_INLINE void broadcast_pair(const char* p, reg (&w)[2]) {
    const ireg both = _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(p));
    w[0] = lower(both);
    w[1] = upper(both);
  }
};

}  // namespace
