// 2:4 by comparing each value with the three others of its group, a group a vector.
#include <cstring>

#include "keep_neon.h"
#include "nm_mask.h"

namespace twofour {
namespace {

inline int32x4_t sort_key(float32x4_t score, bool absolute) {
  const int32x4_t bits = vreinterpretq_s32_f32(vaddq_f32(score, vdupq_n_f32(0)));  // -0.0 becomes +0.0
  const int32x4_t magnitude = vdupq_n_s32(0x7fffffff);
  if (absolute) return vandq_s32(bits, magnitude);
  return veorq_s32(bits, vandq_s32(vshrq_n_s32(bits, 31), magnitude));
}

template <bool kAbsolute>
bool run(const NmMask& a) {
  const int32x4_t exponent = vdupq_n_s32(0x7f800000);
  uint32x4_t bad = vdupq_n_u32(0);
  for (int64_t i = 0; i < 4 * a.groups; i += 4) {
    const float32x4_t score = vld1q_f32(a.scores + i);
    bad = vorrq_u32(bad, vceqq_s32(vandq_s32(vreinterpretq_s32_f32(score), exponent), exponent));
    const uint16x4_t words = vmovn_u32(vshrq_n_u32(keep_two_of_four(sort_key(score, kAbsolute)), 31));
    const uint32_t bytes = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words))), 0);
    std::memcpy(a.keep + i, &bytes, 4);
  }
  return vmaxvq_u32(bad) == 0;
}

}  // namespace

bool nm_mask_2x4_f32__neon(const NmMask& a) { return a.absolute ? run<true>(a) : run<false>(a); }

}  // namespace twofour
