// Which two of every four sort keys are kept, a group a vector: shared by the mask and the compress kernels.
// Only for files compiled for NEON; internal linkage, so each carries its own copy.
#pragma once

#include <arm_neon.h>

namespace twofour {
namespace {

// All ones in the lanes that lose to `other`: it is larger, or equal and of lower index (`lower` marks those lanes).
inline uint32x4_t loses(int32x4_t other, int32x4_t key, uint32x4_t lower) {
  return vorrq_u32(vcgtq_s32(other, key), vandq_u32(vceqq_s32(other, key), lower));
}

// All ones in the two lanes that are kept: those that lose to at most one of the three others.
inline uint32x4_t keep_two_of_four(int32x4_t key) {
  constexpr uint32_t ones = 0xffffffffu;
  const uint32x4_t lower1 = {0, 0, 0, ones}, lower2 = {0, 0, ones, ones}, lower3 = {0, ones, ones, ones};
  const uint32x4_t l1 = loses(vextq_s32(key, key, 1), key, lower1);
  const uint32x4_t l2 = loses(vextq_s32(key, key, 2), key, lower2);
  const uint32x4_t l3 = loses(vextq_s32(key, key, 3), key, lower3);
  return vmvnq_u32(vorrq_u32(vandq_u32(l1, l2), vandq_u32(vorrq_u32(l1, l2), l3)));
}

// One bit a lane.
inline uint32_t bits_of(uint32x4_t mask) {
  const uint32x4_t each = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(mask, each));
}

}  // namespace
}  // namespace twofour
