// Cells of two bfloat16 numbers, for sets with AVX512-BF16: vdpbf16ps rounds both sums to nearest and takes denormals for
// zero. Internal linkage.
#pragma once

#include "cells.h"

namespace {

struct PairCells {
  using V = WholeLanes;
  using Element = uint16_t;
  using reg = __m512;
  static constexpr int step = 2;
  static constexpr bool scaled_queries = false;

  static reg load(const Element* p, int64_t count) {
    const auto present = static_cast<__mmask32>((uint64_t{1} << count) - 1);
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(present, p));
  }
  static reg load_column(const Element* row, const Element* next, int64_t count) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(V::mask(count), row));
    if (next == nullptr) return _mm512_castsi512_ps(low);
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(V::mask(count), next));
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  // Numbers of two rows as cells over them.
  static reg both(reg row, reg next) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(row));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(next));
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  static reg multiply_add(reg a, reg b, reg c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
  static reg exp2(reg x) { return exp2_rough<V>(x); }
  // A row of weights takes half of its scores' place: what is written has been read.
  static void store_weights(float* row, int64_t at, reg p, int64_t count) {
    char* to = reinterpret_cast<char*>(row) + 2 * at;
    _mm256_mask_storeu_epi16(to, V::mask(count), (__m256i)_mm512_cvtneps_pbh(p));
  }
  static void clear_weights(float* row, int64_t begin, int64_t end) {
    if (end > begin) __builtin_memset(reinterpret_cast<char*>(row) + 2 * begin, 0, static_cast<size_t>(2 * (end - begin)));
  }
};

}  // namespace
