// Sixteen float32 values in AVX-512: what every kernel with float sums needs; a kernel's own vector type adds to it.
// `load_aligned` and `store_aligned` want 64-byte alignment. Internal linkage: for instruction-set objects only.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12's own _mm512_undefined_ps
#endif
#include <immintrin.h>

#include <cstdint>

#include "compiler.h"
#include "simd.h"

namespace {

struct Lanes {
  using reg = __m512;
  using ireg = __m512i;
  static constexpr int width = 16;

  static __mmask16 mask(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
  static reg zero() { return _mm512_setzero_ps(); }
  static reg load_aligned(const float* p) { return _mm512_load_ps(p); }
  // A load that stays one: without the barrier gcc folds it into each multiply-add that uses it, loading twice.
  static reg load_shared(const float* p) {
    reg v = load_aligned(p);
    asm("" : "+v"(v));
    return v;
  }
  static reg load_unaligned(const float* p) { return _mm512_loadu_ps(p); }
  static reg load_partial(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(mask(count), p); }
  static void store_aligned(float* p, reg v) { _mm512_store_ps(p, v); }
  static void store_unaligned(float* p, reg v) { _mm512_storeu_ps(p, v); }
  static void store_partial(float* p, reg v, int64_t count) { _mm512_mask_storeu_ps(p, mask(count), v); }
  static reg broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static reg broadcast4(const float* p) { return _mm512_broadcast_f32x4(_mm_load_ps(p)); }
  static reg add(reg a, reg b) { return _mm512_add_ps(a, b); }
  static reg fma(reg w, const float* x, reg sum) { return _mm512_fmadd_ps(w, _mm512_load_ps(x), sum); }
  static reg fma(reg w, reg x, reg sum) { return _mm512_fmadd_ps(w, x, sum); }
  // Forced inline: gcc 12 takes a function that only prefetches for one without effect and drops its calls.
  static TWOFOUR_INLINE void prefetch(const void* p, int64_t near, int64_t far) {
    _mm_prefetch(static_cast<const char*>(p) + near, _MM_HINT_T0);
    _mm_prefetch(static_cast<const char*>(p) + far, _MM_HINT_T1);
  }

  static ireg load_index(const char* p) { return _mm512_load_si512(p); }
  template <int bits>
  static ireg shift_right(ireg v) {
    return _mm512_srli_epi32(v, bits);
  }
  static reg permute4(reg x, ireg i) { return _mm512_permutevar_ps(x, i); }

  static bool all_below_64(const uint8_t* p) {  // 64 bytes
    return _mm512_test_epi8_mask(_mm512_loadu_si512(p), _mm512_set1_epi8(-64)) == 0;
  }

  static void transpose(reg (&t)[16]) {
    reg s[16];
    TWOFOUR_UNROLL
    for (int i = 0; i < 16; i += 4) {
      const reg a = _mm512_unpacklo_ps(t[i], t[i + 1]), b = _mm512_unpackhi_ps(t[i], t[i + 1]);
      const reg c = _mm512_unpacklo_ps(t[i + 2], t[i + 3]), d = _mm512_unpackhi_ps(t[i + 2], t[i + 3]);
      s[i] = _mm512_shuffle_ps(a, c, 0x44);
      s[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
      s[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
      s[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
    }
    TWOFOUR_UNROLL
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
static_assert(FloatLanes<Lanes>);

}  // namespace
