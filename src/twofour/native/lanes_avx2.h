// Eight float32 values in AVX2 with FMA: what every kernel with float sums needs; a kernel's own vector type adds to it.
// `load_aligned` and `store_aligned` want 32-byte alignment. Internal linkage: for instruction-set objects only.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "compiler.h"
#include "simd.h"

namespace {

struct Lanes {
  using reg = __m256;
  using ireg = __m256i;
  static constexpr int width = 8;

  static __m256i mask(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static reg zero() { return _mm256_setzero_ps(); }
  static reg load_aligned(const float* p) { return _mm256_load_ps(p); }
  // A load that stays one: without the barrier gcc folds it into each multiply-add that uses it, loading twice.
  static reg load_shared(const float* p) {
    reg v = load_aligned(p);
    asm("" : "+x"(v));
    return v;
  }
  static reg load_unaligned(const float* p) { return _mm256_loadu_ps(p); }
  static reg load_partial(const float* p, int64_t count) { return _mm256_maskload_ps(p, mask(count)); }
  static void store_aligned(float* p, reg v) { _mm256_store_ps(p, v); }
  static void store_unaligned(float* p, reg v) { _mm256_storeu_ps(p, v); }
  static void store_partial(float* p, reg v, int64_t count) { _mm256_maskstore_ps(p, mask(count), v); }
  static reg broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static reg broadcast4(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }
  static reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
  static reg fma(reg w, const float* x, reg sum) { return _mm256_fmadd_ps(w, _mm256_load_ps(x), sum); }
  static reg fma(reg w, reg x, reg sum) { return _mm256_fmadd_ps(w, x, sum); }
  // Forced inline: gcc 12 takes a function that only prefetches for one without effect and drops its calls.
  static TWOFOUR_INLINE void prefetch(const void* p, int64_t near, int64_t far) {
    _mm_prefetch(static_cast<const char*>(p) + near, _MM_HINT_T0);
    _mm_prefetch(static_cast<const char*>(p) + far, _MM_HINT_T1);
  }

  static ireg load_index(const char* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
  template <int bits>
  static ireg shift_right(ireg v) {
    return _mm256_srli_epi32(v, bits);
  }
  static reg permute4(reg x, ireg i) { return _mm256_permutevar_ps(x, i); }

  static bool all_below_64(const uint8_t* p) {  // 64 bytes
    const auto half = [&](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i); };
    return _mm256_testz_si256(_mm256_or_si256(half(0), half(1)), _mm256_set1_epi8(-64));
  }

  static void transpose(reg (&t)[8]) {
    reg s[8];
    TWOFOUR_UNROLL
    for (int i = 0; i < 8; i += 4) {
      const reg a = _mm256_unpacklo_ps(t[i], t[i + 1]), b = _mm256_unpackhi_ps(t[i], t[i + 1]);
      const reg c = _mm256_unpacklo_ps(t[i + 2], t[i + 3]), d = _mm256_unpackhi_ps(t[i + 2], t[i + 3]);
      s[i] = _mm256_shuffle_ps(a, c, 0x44);
      s[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
      s[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
      s[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
    TWOFOUR_UNROLL
    for (int i = 0; i < 4; i++) {
      t[i] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x20);
      t[i + 4] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x31);
    }
  }
};
static_assert(FloatLanes<Lanes>);

}  // namespace
