// Sixteen float32 values: what AVX-512 does better than the compiler's vectors. `load_aligned`, `load_shared` and
// `store_aligned` want 64-byte alignment.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12's own _mm512_undefined_ps
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <cstdint>

#include "compiler.h"

namespace {

struct SetLanes {
  using reg = __m512;
  using ireg = __m512i;
  static constexpr int width = 16, sums = 16;

  static __mmask16 mask(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
  static reg zero() { return _mm512_setzero_ps(); }
  static reg all(float value) { return _mm512_set1_ps(value); }
  static reg load_aligned(const float* p) { return _mm512_load_ps(p); }
  // A load that stays one: without the barrier gcc folds it into each multiply-add that uses it, loading twice.
  static reg load_shared(const float* p) {
    reg v = load_aligned(p);
    asm("" : "+v"(v));
    return v;
  }
  static reg load_unaligned(const float* p) { return _mm512_loadu_ps(p); }
  static reg widened(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
  static reg load_unaligned(const uint16_t* p) {
    return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static reg load_partial(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(mask(count), p); }
  static reg load_partial(const uint16_t* p, int64_t count) {
    return widened(_mm256_maskz_loadu_epi16(mask(count), p));
  }
  static void store_aligned(float* p, reg v) { _mm512_store_ps(p, v); }
  static void store_unaligned(float* p, reg v) { _mm512_storeu_ps(p, v); }
  static void store_partial(float* p, reg v, int64_t count) { _mm512_mask_storeu_ps(p, mask(count), v); }
  // Past the caches, to addresses of `streamed` bytes; order_streams goes before whatever tells others of it.
  static constexpr int streamed = 64;
  static void stream(float* p, reg v) { _mm512_stream_ps(p, v); }
  static ireg uppers(reg v) { return _mm512_srli_epi32(_mm512_castps_si512(v), 16); }
  static void stream_upper(uint16_t* p, reg v) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(uppers(v)));
  }
  static void order_streams() { _mm_sfence(); }
  static void store_upper(uint16_t* p, reg v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(uppers(v)));
  }
  static void store_upper_partial(uint16_t* p, reg v, int64_t count) {
    _mm512_mask_cvtepi32_storeu_epi16(p, mask(count), uppers(v));
  }
  static reg broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static reg broadcast_shared(const float* p) {  // as load_shared
    reg v = broadcast(p);
    asm("" : "+v"(v));
    return v;
  }
  static reg broadcast4(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
  static reg fma(reg w, const float* x, reg sum) { return _mm512_fmadd_ps(w, _mm512_load_ps(x), sum); }
  static reg fma(reg w, reg x, reg sum) { return _mm512_fmadd_ps(w, x, sum); }
  static reg min(reg a, reg b) { return _mm512_min_ps(a, b); }
  static reg max(reg a, reg b) { return _mm512_max_ps(a, b); }
  static reg sqrt(reg a) { return _mm512_sqrt_ps(a); }
  static reg round(reg a) { return _mm512_roundscale_ps(a, 8); }
  static ireg to_ints(reg a) { return _mm512_cvtps_epi32(a); }
  static reg scale(reg a, reg n) { return _mm512_scalef_ps(a, n); }
  static reg scale_from(float least, reg x, reg a, reg n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, all(least), _CMP_NLT_UQ), a, n);
  }
  static reg where_byte(const uint8_t* bytes, int64_t count, reg v, reg other) {
    const __m128i loaded = _mm_maskz_loadu_epi8(mask(count), bytes);
    return _mm512_mask_mov_ps(other, _mm_test_epi8_mask(loaded, loaded), v);
  }
  static float sum(reg a) { return _mm512_reduce_add_ps(a); }
  static float smallest(reg a) { return _mm512_reduce_min_ps(a); }
  static float largest(reg a) { return _mm512_reduce_max_ps(a); }
  // Forced inline: gcc 12 takes a function that only prefetches for one without effect and drops its calls.
  static TWOFOUR_INLINE void prefetch(const void* p, int64_t near, int64_t far) {
    _mm_prefetch(static_cast<const char*>(p) + near, _MM_HINT_T0);
    _mm_prefetch(static_cast<const char*>(p) + far, _MM_HINT_T1);
  }

  static ireg load_index(const void* p) { return _mm512_load_si512(p); }
  template <int bits>
  static ireg shift_right(ireg v) {
    return _mm512_srli_epi32(v, bits);
  }
  static reg permute4(reg x, ireg i) { return _mm512_permutevar_ps(x, i); }

  static bool all_below_64(const uint8_t* p) {  // 64 bytes
    return _mm512_test_epi8_mask(_mm512_loadu_si512(p), _mm512_set1_epi8(-64)) == 0;
  }

  static TWOFOUR_INLINE ireg from(int first, int step) {  // first, first + step, ...
    typedef int32_t I __attribute__((vector_size(64)));
    return (ireg)(I{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * step + first);
  }
  static TWOFOUR_INLINE ireg alternating(int first) {  // first, first + 16, first + 1, first + 17, ...
    typedef int32_t I __attribute__((vector_size(64)));
    const I lane = (I)from(0, 1);
    return (ireg)(lane / 2 + lane % 2 * 16 + first);
  }
  static TWOFOUR_INLINE reg evens(reg a, reg b) { return _mm512_permutex2var_ps(a, from(0, 2), b); }
  static TWOFOUR_INLINE reg odds(reg a, reg b) { return _mm512_permutex2var_ps(a, from(1, 2), b); }
  static TWOFOUR_INLINE reg lows(reg a, reg b) { return _mm512_permutex2var_ps(a, alternating(0), b); }
  static TWOFOUR_INLINE reg highs(reg a, reg b) { return _mm512_permutex2var_ps(a, alternating(8), b); }
  static TWOFOUR_INLINE uint64_t nibbles(ireg v) {  // bytes, then low + 16 * high of every two
    const __m128i words = _mm_maddubs_epi16(_mm512_cvtepi32_epi8(v), _mm_set1_epi16(0x1001));
    return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_packus_epi16(words, words)));
  }

  static TWOFOUR_INLINE void transpose_quarters(reg& t0, reg& t1, reg& t2, reg& t3) {
    const reg a = _mm512_unpacklo_ps(t0, t1), b = _mm512_unpackhi_ps(t0, t1);
    const reg c = _mm512_unpacklo_ps(t2, t3), d = _mm512_unpackhi_ps(t2, t3);
    t0 = _mm512_shuffle_ps(a, c, 0x44);
    t1 = _mm512_shuffle_ps(a, c, 0xee);
    t2 = _mm512_shuffle_ps(b, d, 0x44);
    t3 = _mm512_shuffle_ps(b, d, 0xee);
  }
  static TWOFOUR_INLINE void transpose_quarters(reg (&t)[4]) { transpose_quarters(t[0], t[1], t[2], t[3]); }
  static ireg from_quarters(ireg v) {
    const ireg order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, v);
  }
  static void transpose(reg (&t)[16]) {
    TWOFOUR_UNROLL
    for (int i = 0; i < 16; i += 4) transpose_quarters(t[i], t[i + 1], t[i + 2], t[i + 3]);
    TWOFOUR_UNROLL
    for (int i = 0; i < 4; i++) {  // the 4 x 4 transpose of 128-bit lanes
      const reg a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
      const reg c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
      const reg d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
      t[i] = _mm512_shuffle_f32x4(a, c, 0x88);
      t[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
      t[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
      t[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
  }
};

}  // namespace
