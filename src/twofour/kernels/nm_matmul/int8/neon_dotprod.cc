// The row with SDOT, which multiplies signed bytes: 128 is taken from the activations and added again.
#include <arm_neon.h>

#include "portable.h"

namespace {

struct Vec : Portable {
  static constexpr int row_halves = 1, row_tokens = 4, row_sums = 16;

  // Four kept values of each of four rows, and where their activations stand among the eight.
  struct Octet {
    int8x16_t values;
    uint8x16_t places;
  };
  static TWOFOUR_INLINE Octet octet(const uint8_t* p, ints meta) {
    const uint8x16_t second = vreinterpretq_u8_u32(vdupq_n_u32(0x04040000u));  // of the second group of four
    const uint8x16_t low = vandq_u8(vreinterpretq_u8_s32(meta), vdupq_n_u8(3));
    return {vld1q_s8(reinterpret_cast<const int8_t*>(p)), vorrq_u8(low, second)};
  }
  static TWOFOUR_INLINE uint8x16_t broadcast8(const uint8_t* p) { return vcombine_u8(vld1_u8(p), vld1_u8(p)); }
  static TWOFOUR_INLINE ints dot(ints sum, uint8x16_t x, const Octet& w) {
    const uint8x16_t chosen = vqtbl1q_u8(x, w.places);
    // x - 128 fits a signed byte; 128 times the weights comes back as 64 twice.
    const int8x16_t shifted = vreinterpretq_s8_u8(veorq_u8(chosen, vdupq_n_u8(0x80)));
    const int8x16_t half = vdupq_n_s8(64);
    return vdotq_s32(vdotq_s32(vdotq_s32(sum, w.values, shifted), w.values, half), w.values, half);
  }
};

}  // namespace

namespace twofour {

int64_t nm_matmul_2x4_int8_rows__neon_dotprod__workspace(const NmMatmul& a) { return row_octets_workspace<Vec>(a); }
void nm_matmul_2x4_int8_rows__neon_dotprod(const NmMatmul& a) { row_octets<Vec>(a); }

}  // namespace twofour
