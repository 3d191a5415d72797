// Four float32 values: what NEON does better than the compiler's vectors.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "compiler.h"
#include "lanes_portable.h"

namespace {

struct SetLanes : PortableLanes {
  static constexpr int sums = 16;  // of 32 registers

  static reg fma(reg w, const float* x, reg sum) { return vfmaq_f32(sum, w, vld1q_f32(x)); }
  static reg fma(reg w, reg x, reg sum) { return vfmaq_f32(sum, w, x); }
  static TWOFOUR_INLINE void prefetch(const void* p, int64_t near, int64_t far) {
    __builtin_prefetch(static_cast<const char*>(p) + near, 0, 3);
    __builtin_prefetch(static_cast<const char*>(p) + far, 0, 2);
  }
  static void store_upper_partial(uint16_t* p, reg v, int64_t count) {
    const uint16x4_t words = vshrn_n_u32(vreinterpretq_u32_f32(v), 16);
    std::memcpy(p, &words, static_cast<size_t>(2 * count));
  }
  static void store_upper(uint16_t* p, reg v) { store_upper_partial(p, v, 4); }

  // The low two bits of each index choose one of four values: bytes 4 i ... 4 i + 3 of a table look-up.
  static reg permute4(reg x, ireg i) {
    const uint32x4_t bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100u), vandq_u32(i, vdupq_n_u32(3)), 0x04040404u);
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

}  // namespace
