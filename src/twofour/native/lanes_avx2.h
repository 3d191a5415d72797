// Eight float32 values: what AVX2 with FMA does better than the compiler's vectors. `load_aligned`, `load_shared` and
// `store_aligned` want 32-byte alignment.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "compiler.h"

namespace {

struct SetLanes {
  using reg = __m256;
  using ireg = __m256i;
  static constexpr int width = 8, sums = 8;

  static __m256i mask(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static reg zero() { return _mm256_setzero_ps(); }
  static reg all(float value) { return _mm256_set1_ps(value); }
  static reg load_aligned(const float* p) { return _mm256_load_ps(p); }
  // A load that stays one: without the barrier gcc folds it into each multiply-add that uses it, loading twice.
  static reg load_shared(const float* p) {
    reg v = load_aligned(p);
    asm("" : "+x"(v));
    return v;
  }
  static reg load_unaligned(const float* p) { return _mm256_loadu_ps(p); }
  static reg load_unaligned(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static reg load_partial(const float* p, int64_t count) { return _mm256_maskload_ps(p, mask(count)); }
  static reg load_partial(const uint16_t* p, int64_t count) {
    if (count >= width) return load_unaligned(p);
    uint16_t some[width] = {};
    std::memcpy(some, p, static_cast<size_t>(2 * count));
    return load_unaligned(some);
  }
  static void store_aligned(float* p, reg v) { _mm256_store_ps(p, v); }
  static void store_unaligned(float* p, reg v) { _mm256_storeu_ps(p, v); }
  static void store_partial(float* p, reg v, int64_t count) { _mm256_maskstore_ps(p, mask(count), v); }
  // Past the caches, to addresses of `streamed` bytes; order_streams goes before whatever tells others of it.
  static constexpr int streamed = 32;
  static void stream(float* p, reg v) { _mm256_stream_ps(p, v); }
  static __m128i uppers(reg v) {
    const __m256i words = _mm256_srli_epi32(_mm256_castps_si256(v), 16);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08));
  }
  static void stream_upper(uint16_t* p, reg v) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), uppers(v)); }
  static void order_streams() { _mm_sfence(); }
  static void store_upper(uint16_t* p, reg v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), uppers(v)); }
  static void store_upper_partial(uint16_t* p, reg v, int64_t count) {
    if (count >= width) return store_upper(p, v);
    const __m128i words = uppers(v);
    std::memcpy(p, &words, static_cast<size_t>(2 * count));
  }
  static reg broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static reg broadcast_shared(const float* p) { return broadcast(p); }
  static reg broadcast4(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }
  static reg fma(reg w, const float* x, reg sum) { return _mm256_fmadd_ps(w, _mm256_load_ps(x), sum); }
  static reg fma(reg w, reg x, reg sum) { return _mm256_fmadd_ps(w, x, sum); }
  static reg min(reg a, reg b) { return _mm256_min_ps(a, b); }
  static reg max(reg a, reg b) { return _mm256_max_ps(a, b); }
  static reg sqrt(reg a) { return _mm256_sqrt_ps(a); }
  static reg round(reg a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static ireg to_ints(reg a) { return _mm256_cvtps_epi32(a); }
  static reg scale(reg a, reg n) {
    const reg in = _mm256_min_ps(_mm256_set1_ps(128.0f), _mm256_max_ps(_mm256_set1_ps(-127.0f), n));
    const ireg biased = _mm256_add_epi32(_mm256_cvtps_epi32(in), _mm256_set1_epi32(127));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
  }
  static reg scale_from(float least, reg x, reg a, reg n) {
    const ireg biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    const reg scaled = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
    return _mm256_and_ps(_mm256_cmp_ps(x, all(least), _CMP_NLT_UQ), scaled);
  }
  static reg where_byte(const uint8_t* bytes, int64_t count, reg v, reg other) {
    uint64_t word = 0;
    for (int64_t i = 0; i < count; ++i) word |= uint64_t{bytes[i]} << (8 * i);
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(word)));
    return _mm256_blendv_ps(v, other, _mm256_castsi256_ps(_mm256_cmpeq_epi32(wide, _mm256_setzero_si256())));
  }
  template <class Two>
  static TWOFOUR_INLINE float folded(reg a, const Two& two) {
    const __m128 half = two(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 pair = two(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(two(pair, _mm_movehdup_ps(pair)));
  }
  static float sum(reg a) {
    return folded(a, [](__m128 x, __m128 y) { return _mm_add_ps(x, y); });
  }
  static float smallest(reg a) {
    return folded(a, [](__m128 x, __m128 y) { return _mm_min_ps(x, y); });
  }
  static float largest(reg a) {
    return folded(a, [](__m128 x, __m128 y) { return _mm_max_ps(x, y); });
  }
  // Forced inline: gcc 12 takes a function that only prefetches for one without effect and drops its calls.
  static TWOFOUR_INLINE void prefetch(const void* p, int64_t near, int64_t far) {
    _mm_prefetch(static_cast<const char*>(p) + near, _MM_HINT_T0);
    _mm_prefetch(static_cast<const char*>(p) + far, _MM_HINT_T1);
  }

  static ireg load_index(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }
  template <int bits>
  static ireg shift_right(ireg v) {
    return _mm256_srli_epi32(v, bits);
  }
  static reg permute4(reg x, ireg i) { return _mm256_permutevar_ps(x, i); }

  static bool all_below_64(const uint8_t* p) {  // 64 bytes
    const auto half = [&](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i); };
    return _mm256_testz_si256(_mm256_or_si256(half(0), half(1)), _mm256_set1_epi8(-64));
  }

  // Quarters 0 2 1 3: what a shuffle inside the halves leaves out of order.
  static TWOFOUR_INLINE reg ordered(reg v) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8));
  }
  static TWOFOUR_INLINE reg evens(reg a, reg b) { return ordered(_mm256_shuffle_ps(a, b, 0x88)); }
  static TWOFOUR_INLINE reg odds(reg a, reg b) { return ordered(_mm256_shuffle_ps(a, b, 0xdd)); }
  static TWOFOUR_INLINE reg lows(reg a, reg b) {
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x20);
  }
  static TWOFOUR_INLINE reg highs(reg a, reg b) {
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x31);
  }
  static TWOFOUR_INLINE uint64_t nibbles(ireg v) {  // bytes, then low + 16 * high of every two
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    const __m128i pairs = _mm_maddubs_epi16(_mm_packus_epi16(words, words), _mm_set1_epi16(0x1001));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_packus_epi16(pairs, pairs)));
  }

  static TWOFOUR_INLINE void transpose_quarters(reg& t0, reg& t1, reg& t2, reg& t3) {
    const reg a = _mm256_unpacklo_ps(t0, t1), b = _mm256_unpackhi_ps(t0, t1);
    const reg c = _mm256_unpacklo_ps(t2, t3), d = _mm256_unpackhi_ps(t2, t3);
    t0 = _mm256_shuffle_ps(a, c, 0x44);
    t1 = _mm256_shuffle_ps(a, c, 0xee);
    t2 = _mm256_shuffle_ps(b, d, 0x44);
    t3 = _mm256_shuffle_ps(b, d, 0xee);
  }
  static TWOFOUR_INLINE void transpose_quarters(reg (&t)[4]) { transpose_quarters(t[0], t[1], t[2], t[3]); }
  static ireg from_quarters(ireg v) {
    return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static void transpose(reg (&t)[8]) {
    TWOFOUR_UNROLL
    for (int i = 0; i < 8; i += 4) transpose_quarters(t[i], t[i + 1], t[i + 2], t[i + 3]);
    TWOFOUR_UNROLL
    for (int i = 0; i < 4; i++) {
      const reg low = t[i], high = t[i + 4];
      t[i] = _mm256_permute2f128_ps(low, high, 0x20);
      t[i + 4] = _mm256_permute2f128_ps(low, high, 0x31);
    }
  }
};

}  // namespace
