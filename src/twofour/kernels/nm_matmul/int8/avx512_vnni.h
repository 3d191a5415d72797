// The AVX-512 vector type of the int8 products. Included once per instruction-set file; internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "native/compiler.h"

namespace {

struct Vec {
  using reg = __m512;
  using ints = __m512i;
  static constexpr int width = 16;
  static constexpr int row_halves = 2, row_tokens = 8, row_sums = 16;

  static __mmask16 mask(int64_t count) { return static_cast<__mmask16>(count >= width ? 0xffff : (1u << count) - 1); }
  static reg zero() { return _mm512_setzero_ps(); }
  static reg set(float v) { return _mm512_set1_ps(v); }
  static reg load_aligned(const float* p) { return _mm512_load_ps(p); }
  static reg load_x(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(mask(count), p); }
  static reg load_x(const uint16_t* p, int64_t count) {
    const __m256i half = _mm256_maskz_loadu_epi16(mask(count), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static reg add(reg a, reg b) { return _mm512_add_ps(a, b); }
  static reg mul(reg a, reg b) { return _mm512_mul_ps(a, b); }
  static reg times_zero(reg v, reg sum) { return _mm512_fmadd_ps(v, zero(), sum); }
  static reg min(reg a, reg b) { return _mm512_min_ps(a, b); }
  static reg max(reg a, reg b) { return _mm512_max_ps(a, b); }
  static float least(reg v) { return _mm512_reduce_min_ps(v); }
  static float most(reg v) { return _mm512_reduce_max_ps(v); }
  static float sum(reg v) { return _mm512_reduce_add_ps(v); }
  static int32_t nearest(float v) { return _mm_cvtss_si32(_mm_set_ss(v)); }

  // clamp(nearest even(v * factor) + zero, low, high); a NaN becomes `low`.
  struct Rounder {
    reg factor, least, most;
    ints zero;
    TWOFOUR_INLINE Rounder(float f, int32_t z, int low, int high)
        : factor(_mm512_set1_ps(f)),
          least(_mm512_set1_ps(static_cast<float>(low) - static_cast<float>(z))),
          most(_mm512_set1_ps(static_cast<float>(high) - static_cast<float>(z))),
          zero(_mm512_set1_epi32(z)) {}
    TWOFOUR_INLINE ints operator()(reg v) const {
      const reg inside = _mm512_min_ps(_mm512_max_ps(_mm512_mul_ps(v, factor), least), most);
      return _mm512_add_epi32(_mm512_cvtps_epi32(inside), zero);
    }
  };
  static TWOFOUR_INLINE void store_x(ints q, uint8_t* to, int64_t k, int64_t stride) {
    const __m128i bytes = _mm512_cvtepi32_epi8(q);
    uint8_t* at = to + k / 8 * stride;
    _mm_storel_epi64(reinterpret_cast<__m128i*>(at), bytes);
    _mm_storeh_pd(reinterpret_cast<double*>(at + stride), _mm_castsi128_pd(bytes));
  }

  static ints no_ints() { return _mm512_setzero_si512(); }
  static ints load_ints(const uint8_t* p) { return _mm512_load_si512(p); }
  static void store_ints(int32_t* p, ints v) { _mm512_store_si512(p, v); }
  static ints add(ints a, ints b) { return _mm512_add_epi32(a, b); }
  static ints minus_product(ints a, ints b, int32_t c) {
    return _mm512_sub_epi32(a, _mm512_mullo_epi32(b, _mm512_set1_epi32(c)));
  }
  static reg to_real(ints v) { return _mm512_cvtepi32_ps(v); }

  struct Octet {
    ints values, control;
  };
  // vpermb reads 6 bits of a control byte; the eight inputs repeat, so 3 of them count: the index, and in the upper
  // half of a dword the second group.
  static TWOFOUR_INLINE Octet octet(const uint8_t* p, ints meta) {
    return {_mm512_load_si512(p),
            _mm512_ternarylogic_epi32(meta, _mm512_set1_epi8(3), _mm512_set1_epi32(0x04040000), 0xea)};
  }
  static ints next_index(ints meta) { return _mm512_srli_epi32(meta, 2); }
  static TWOFOUR_INLINE ints broadcast8(const uint8_t* p) {
    return _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static TWOFOUR_INLINE ints dot(ints sum, ints x, const Octet& w) {
    return _mm512_dpbusd_epi32(sum, _mm512_permutexvar_epi8(w.control, x), w.values);
  }
  // Forced inline: gcc 12 takes a function that only prefetches for one without effect and drops its calls.
  static TWOFOUR_INLINE void prefetch(const uint8_t* p, int64_t near, int64_t far) {
    _mm_prefetch(reinterpret_cast<const char*>(p) + near, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(p) + far, _MM_HINT_T1);
  }

  static TWOFOUR_INLINE void store_f32(float* p, reg v, int64_t count) { _mm512_mask_storeu_ps(p, mask(count), v); }
  static TWOFOUR_INLINE void store_bf16(uint16_t* p, reg v, int64_t count) {
    const ints bits = _mm512_castps_si512(v);
    const ints odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const ints even = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const ints rounded = _mm512_mask_mov_epi32(even, nan, _mm512_set1_epi32(0x7fc00000));
    _mm512_mask_cvtepi32_storeu_epi16(p, mask(count), _mm512_srli_epi32(rounded, 16));
  }
  static TWOFOUR_INLINE void store_bytes(uint8_t* p, ints v, int64_t count) {
    _mm512_mask_cvtepi32_storeu_epi8(p, mask(count), v);
  }
};

}  // namespace
