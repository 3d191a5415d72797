// Four float32 values as GCC and clang write vectors, lowered to SSE2, NEON or plain scalar code: what simd.h builds on.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "compiler.h"

namespace {

struct PortableLanes {
  typedef float reg __attribute__((vector_size(16)));
  typedef uint32_t ireg __attribute__((vector_size(16)));
  typedef uint16_t halves __attribute__((vector_size(8)));
  static constexpr int width = 4, sums = 4;

  static reg zero() { return reg{0, 0, 0, 0}; }
  static reg all(float value) { return reg{value, value, value, value}; }
  static reg load_aligned(const float* p) { return load_unaligned(p); }
  static reg load_shared(const float* p) { return load_unaligned(p); }
  static reg load_unaligned(const float* p) {
    reg v;
    std::memcpy(&v, p, 16);
    return v;
  }
  static reg load_unaligned(const uint16_t* p) {
    halves v;
    std::memcpy(&v, p, 8);
    return (reg)(__builtin_convertvector(v, ireg) << 16);
  }
  // Called, as are the other parts of vectors: inlined, what stands at edges is a tenth of this set's code.
  static TWOFOUR_NOINLINE reg load_partial(const float* p, int64_t count) {
    reg v = zero();
    for (int64_t i = 0; i < width && i < count; i++) v[i] = p[i];
    return v;
  }
  static TWOFOUR_NOINLINE reg load_partial(const uint16_t* p, int64_t count) {
    ireg v = {0, 0, 0, 0};
    for (int64_t i = 0; i < width && i < count; i++) v[i] = uint32_t{p[i]} << 16;
    return (reg)v;
  }
  static void store_aligned(float* p, reg v) { std::memcpy(p, &v, 16); }
  static void store_unaligned(float* p, reg v) { std::memcpy(p, &v, 16); }
  static TWOFOUR_NOINLINE void store_partial(float* p, reg v, int64_t count) {
    for (int64_t i = 0; i < width && i < count; i++) p[i] = v[i];
  }
  static void store_upper(uint16_t* p, reg v) {
    const halves upper = __builtin_convertvector((ireg)v >> 16, halves);
    std::memcpy(p, &upper, 8);
  }
  static TWOFOUR_NOINLINE void store_upper_partial(uint16_t* p, reg v, int64_t count) {
    const ireg bits = (ireg)v >> 16;
    for (int64_t i = 0; i < width && i < count; i++) p[i] = static_cast<uint16_t>(bits[i]);
  }
  static constexpr int streamed = 1;  // no stores past the caches
  static void stream(float* p, reg v) { store_unaligned(p, v); }
  static void stream_upper(uint16_t* p, reg v) { store_upper(p, v); }
  static void order_streams() {}
  static reg broadcast(const float* p) { return all(*p); }
  static reg broadcast_shared(const float* p) { return all(*p); }
  static reg broadcast4(const float* p) { return load_unaligned(p); }
  static reg fma(reg w, const float* x, reg sum) { return sum + w * load_aligned(x); }
  static reg fma(reg w, reg x, reg sum) { return sum + w * x; }
#if defined(__SSE2__)  // gcc 12 makes none of these instructions of what stands below
  static reg min(reg a, reg b) { return _mm_min_ps(a, b); }
  static reg max(reg a, reg b) { return _mm_max_ps(a, b); }
  static reg sqrt(reg v) { return _mm_sqrt_ps(v); }
#else
  static reg min(reg a, reg b) { return a < b ? a : b; }
  static reg max(reg a, reg b) { return a > b ? a : b; }
  static reg sqrt(reg v) {
    for (int i = 0; i < width; i++) v[i] = __builtin_sqrtf(v[i]);
    return v;
  }
#endif
  // Adding 1.5 * 2^23 leaves no bits below one: the sum is rounded to nearest even, for |v| < 2^22.
  static reg round(reg v) { return (v + 12582912.0f) - 12582912.0f; }
  static ireg to_ints(reg v) {
    typedef int32_t I __attribute__((vector_size(16)));
    return (ireg)__builtin_convertvector(round(v), I);
  }
  static reg scale(reg a, reg n) {
    return a * (reg)((to_ints(min(all(128.0f), max(all(-127.0f), n))) + 127) << 23);
  }
  static reg scale_from(float least, reg x, reg a, reg n) {
    const reg scaled = a * (reg)((to_ints(n) + 127) << 23);
    return x < least ? zero() : scaled;
  }
  static TWOFOUR_NOINLINE reg where_byte(const uint8_t* bytes, int64_t count, reg v, reg other) {
    for (int64_t i = 0; i < width; i++)
      if (i >= count || bytes[i] == 0) v[i] = other[i];
    return v;
  }
  static float sum(reg a) { return (a[0] + a[1]) + (a[2] + a[3]); }
  static float smallest(reg a) {
    const float low = a[0] < a[1] ? a[0] : a[1], high = a[2] < a[3] ? a[2] : a[3];
    return low < high ? low : high;
  }
  static float largest(reg a) { return -smallest(-a); }
  static void prefetch(const void*, int64_t, int64_t) {}

  static ireg load_index(const void* p) {
    ireg v;
    std::memcpy(&v, p, 16);
    return v;
  }
  template <int bits>
  static ireg shift_right(ireg v) {
    return v >> bits;
  }
  static reg permute4(reg x, ireg i) { return reg{x[i[0] & 3], x[i[1] & 3], x[i[2] & 3], x[i[3] & 3]}; }

  static bool all_below_64(const uint8_t* p) {  // 64 bytes
    uint64_t words[8], all = 0;
    std::memcpy(words, p, sizeof words);
    for (const uint64_t word : words) all |= word;
    return (all & 0xC0C0C0C0C0C0C0C0) == 0;
  }

  static TWOFOUR_INLINE reg evens(reg a, reg b) { return reg{a[0], a[2], b[0], b[2]}; }
  static TWOFOUR_INLINE reg odds(reg a, reg b) { return reg{a[1], a[3], b[1], b[3]}; }
  static TWOFOUR_INLINE reg lows(reg a, reg b) { return reg{a[0], b[0], a[1], b[1]}; }
  static TWOFOUR_INLINE reg highs(reg a, reg b) { return reg{a[2], b[2], a[3], b[3]}; }
  static TWOFOUR_INLINE uint64_t nibbles(ireg v) { return v[0] | v[1] << 4 | v[2] << 8 | v[3] << 12; }

  static void transpose(reg (&t)[4]) {
    const reg a = lows(t[0], t[1]), b = lows(t[2], t[3]), c = highs(t[0], t[1]), d = highs(t[2], t[3]);
    t[0] = reg{a[0], a[1], b[0], b[1]}, t[1] = reg{a[2], a[3], b[2], b[3]};
    t[2] = reg{c[0], c[1], d[0], d[1]}, t[3] = reg{c[2], c[3], d[2], d[3]};
  }
  static void transpose_quarters(reg (&t)[4]) { transpose(t); }
  static ireg from_quarters(ireg v) { return v; }
};

#if !defined(TWOFOUR_SET_neon)
using SetLanes = PortableLanes;
#endif

}  // namespace
