// Octets in 128-bit vectors as GCC and clang write them: the portable row, and what rows with a dot product of bytes in
// such vectors share with it.
#pragma once

#include <cstring>

#include "row_octets.h"

namespace {

struct Portable {
  typedef float reg __attribute__((vector_size(16)));
  typedef int32_t ints __attribute__((vector_size(16)));
  typedef uint32_t uints __attribute__((vector_size(16)));
  static constexpr int width = 4;
  static constexpr int row_halves = 1, row_tokens = 4, row_sums = 4;

  static reg zero() { return reg{0, 0, 0, 0}; }
  static reg set(float v) { return reg{v, v, v, v}; }
  static reg load_aligned(const float* p) { return load_x(p, width); }
  static reg load_x(const float* p, int64_t count) {
    reg v = zero();
    std::memcpy(&v, p, static_cast<size_t>(count < width ? count : width) * 4);
    return v;
  }
  static reg load_x(const uint16_t* p, int64_t count) {
    ints v = {0, 0, 0, 0};
    for (int64_t i = 0; i < width && i < count; i++) v[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
    return reinterpret_cast<reg>(v);
  }
  static reg add(reg a, reg b) { return a + b; }
  static reg mul(reg a, reg b) { return a * b; }
  static reg times_zero(reg v, reg sum) { return sum + v * zero(); }
  static reg min(reg a, reg b) { return a < b ? a : b; }
  static reg max(reg a, reg b) { return a > b ? a : b; }
  static float least(reg v) { return v[0] < v[1] ? least2(v[0], v) : least2(v[1], v); }
  static float least2(float first, reg v) {
    const float second = v[2] < v[3] ? v[2] : v[3];
    return first < second ? first : second;
  }
  static float most(reg v) { return -least(-v); }
  static float sum(reg v) { return (v[0] + v[1]) + (v[2] + v[3]); }
  // Adding 1.5 * 2^23 leaves no bits below one: the sum is rounded to nearest even, for |v| < 2^22.
  static reg to_even(reg v) {
    const reg magic = set(12582912.0f);
    return (v + magic) - magic;
  }
  static int32_t nearest(float v) { return static_cast<int32_t>(to_even(set(v))[0]); }

  // clamp(nearest even(v * factor) + zero, low, high); a NaN becomes `low`.
  struct Rounder {
    reg factor, least, most;
    ints zero;
    Rounder(float f, int32_t z, int low, int high)
        : factor(set(f)), least(set(static_cast<float>(low) - static_cast<float>(z))),
          most(set(static_cast<float>(high) - static_cast<float>(z))),
          zero(ints{z, z, z, z}) {}
    ints operator()(reg v) const {
      return add(__builtin_convertvector(to_even(min(max(v * factor, least), most)), ints), zero);
    }
  };
  static void store_x(ints q, uint8_t* to, int64_t k, int64_t stride) {
    store_bytes(to + k / 8 * stride + k % 8, q, width);
  }

  static ints no_ints() { return ints{0, 0, 0, 0}; }
  static ints load_ints(const uint8_t* p) {
    ints v;
    std::memcpy(&v, p, 16);
    return v;
  }
  static void store_ints(int32_t* p, ints v) { std::memcpy(p, &v, 16); }
  // Unsigned: sums of weights and zero points come from bytes that anybody may have written, and may wrap around.
  static ints add(ints a, ints b) {
    return reinterpret_cast<ints>(reinterpret_cast<uints>(a) + reinterpret_cast<uints>(b));
  }
  static ints minus_product(ints a, ints b, int32_t c) {
    return reinterpret_cast<ints>(reinterpret_cast<uints>(a) - reinterpret_cast<uints>(b) * static_cast<uint32_t>(c));
  }
  static reg to_real(ints v) { return __builtin_convertvector(v, reg); }

  struct Octet {
    const int8_t* values;
    ints meta;
  };
  static Octet octet(const uint8_t* p, ints meta) { return {reinterpret_cast<const int8_t*>(p), meta}; }
  static ints next_index(ints meta) { return meta >> 2; }  // the bits that come in above are never read
  static const uint8_t* broadcast8(const uint8_t* p) { return p; }
  // Called, not inlined: unrolled into every caller this file took a minute and 560 MB to compile.
  TWOFOUR_NOINLINE static ints dot(ints sum, const uint8_t* x, const Octet& w) {
    for (int r = 0; r < width; r++) {
      const int8_t* v = w.values + r * 4;
      const int32_t m = w.meta[r];
      sum[r] += v[0] * x[m & 3] + v[1] * x[m >> 8 & 3] + v[2] * x[4 + (m >> 16 & 3)] + v[3] * x[4 + (m >> 24 & 3)];
    }
    return sum;
  }
  static void prefetch(const uint8_t*, int64_t, int64_t) {}

  static void store_f32(float* p, reg v, int64_t count) {
    std::memcpy(p, &v, static_cast<size_t>(count) * 4);
  }
  static void store_bf16(uint16_t* p, reg v, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
      uint32_t bits;
      const float one = v[i];
      std::memcpy(&bits, &one, 4);
      const uint32_t even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
      p[i] = static_cast<uint16_t>(one != one ? 0x7fc0 : even);
    }
  }
  static void store_bytes(uint8_t* p, ints v, int64_t count) {
    for (int64_t i = 0; i < count; i++) p[i] = static_cast<uint8_t>(v[i]);
  }
};

}  // namespace
