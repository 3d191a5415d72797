// What the two NEON rows of int8 share: four kept values of each of four rows, and the activations they choose.
#pragma once

#include <arm_neon.h>

#include "kernels/octet_lanes.h"
#include "row_octets.h"

namespace {

struct OctetVec : OctetLanes {
  // Four kept values of each of four rows, and where their activations stand among the eight.
  struct Octet {
    int8x16_t values;
    uint8x16_t places;
  };
  static TWOFOUR_INLINE Octet octet(ints values, ints indices) {
    const uint8x16_t second = vreinterpretq_u8_u32(vdupq_n_u32(0x04040000u));  // of the second group of four
    const uint8x16_t low = vandq_u8(vreinterpretq_u8_u32((uint32x4_t)indices), vdupq_n_u8(3));
    return {vreinterpretq_s8_u32((uint32x4_t)values), vorrq_u8(low, second)};
  }
  static TWOFOUR_INLINE uint8x16_t broadcast8(const uint8_t* p) { return vcombine_u8(vld1_u8(p), vld1_u8(p)); }
};

}  // namespace
