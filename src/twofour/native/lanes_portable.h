// Four float32 values as GCC and clang write vectors, lowered to SSE2, NEON or plain scalar code: what every kernel with
// float sums needs; a kernel's own vector type adds to it. Internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace {

struct Lanes {
  typedef float reg __attribute__((vector_size(16)));
  typedef uint32_t ireg __attribute__((vector_size(16)));
  static constexpr int width = 4;

  static reg zero() { return reg{0, 0, 0, 0}; }
  static reg load_aligned(const float* p) { return load_unaligned(p); }
  static reg load_shared(const float* p) { return load_unaligned(p); }
  static reg load_unaligned(const float* p) {
    reg v;
    std::memcpy(&v, p, 16);
    return v;
  }
  static reg load_partial(const float* p, int64_t count) {
    reg v = zero();
    for (int64_t i = 0; i < count; i++) v[i] = p[i];
    return v;
  }
  static void store_aligned(float* p, reg v) { std::memcpy(p, &v, 16); }
  static void store_unaligned(float* p, reg v) { std::memcpy(p, &v, 16); }
  static void store_partial(float* p, reg v, int64_t count) {
    for (int64_t i = 0; i < count; i++) p[i] = v[i];
  }
  static reg broadcast(const float* p) { return reg{*p, *p, *p, *p}; }
  static reg broadcast4(const float* p) { return load_unaligned(p); }
  static reg add(reg a, reg b) { return a + b; }
  static reg fma(reg w, const float* x, reg sum) { return sum + w * load_aligned(x); }
  static reg fma(reg w, reg x, reg sum) { return sum + w * x; }
  static void prefetch(const void*, int64_t, int64_t) {}

  static ireg load_index(const char* p) {
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

  static void transpose(reg (&t)[4]) {
    const reg a = t[0], b = t[1], c = t[2], d = t[3];
    for (int i = 0; i < 4; i++) t[i] = reg{a[i], b[i], c[i], d[i]};
  }
};
static_assert(FloatLanes<Lanes>);

}  // namespace
