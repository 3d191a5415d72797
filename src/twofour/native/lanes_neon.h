// Four float32 values in NEON: what every kernel with float sums needs; a kernel's own vector type adds to it. Internal
// linkage: for instruction-set objects only.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "compiler.h"
#include "simd.h"

namespace {

struct Lanes {
  using reg = float32x4_t;
  using ireg = uint32x4_t;
  static constexpr int width = 4;

  static reg zero() { return vdupq_n_f32(0); }
  static reg load_aligned(const float* p) { return vld1q_f32(p); }
  static reg load_shared(const float* p) { return vld1q_f32(p); }
  static reg load_unaligned(const float* p) { return vld1q_f32(p); }
  static reg load_partial(const float* p, int64_t count) {
    float some[4] = {};
    for (int64_t i = 0; i < 4 && i < count; i++) some[i] = p[i];
    return vld1q_f32(some);
  }
  static void store_aligned(float* p, reg v) { vst1q_f32(p, v); }
  static void store_unaligned(float* p, reg v) { vst1q_f32(p, v); }
  static void store_partial(float* p, reg v, int64_t count) {
    float all[4];
    vst1q_f32(all, v);
    for (int64_t i = 0; i < 4 && i < count; i++) p[i] = all[i];
  }
  static reg broadcast(const float* p) { return vld1q_dup_f32(p); }
  static reg broadcast4(const float* p) { return vld1q_f32(p); }
  static reg add(reg a, reg b) { return vaddq_f32(a, b); }
  static reg fma(reg w, const float* x, reg sum) { return vfmaq_f32(sum, w, vld1q_f32(x)); }
  static reg fma(reg w, reg x, reg sum) { return vfmaq_f32(sum, w, x); }
  static TWOFOUR_INLINE void prefetch(const void* p, int64_t near, int64_t far) {
    __builtin_prefetch(static_cast<const char*>(p) + near, 0, 3);
    __builtin_prefetch(static_cast<const char*>(p) + far, 0, 2);
  }

  static ireg load_index(const char* p) { return vld1q_u32(reinterpret_cast<const uint32_t*>(p)); }
  template <int bits>
  static ireg shift_right(ireg v) {
    return v >> bits;
  }
  // The low two bits of each index choose one of four values: bytes 4 i ... 4 i + 3 of a table look-up.
  static reg permute4(reg x, ireg i) {
    const ireg bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100u), vandq_u32(i, vdupq_n_u32(3)), 0x04040404u);
    return vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(x), vreinterpretq_u8_u32(bytes)));
  }

  static bool all_below_64(const uint8_t* p) {  // 64 bytes
    const uint8x16_t first = vorrq_u8(vld1q_u8(p), vld1q_u8(p + 16));
    const uint8x16_t second = vorrq_u8(vld1q_u8(p + 32), vld1q_u8(p + 48));
    return vmaxvq_u8(vorrq_u8(first, second)) < 64;
  }

  static void transpose(reg (&t)[4]) {
    const float32x4x2_t a = vtrnq_f32(t[0], t[1]), b = vtrnq_f32(t[2], t[3]);
    t[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    t[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    t[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    t[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
  }
};
static_assert(FloatLanes<Lanes>);

}  // namespace
