// The row with SDOT, which multiplies signed bytes: 128 is taken from the activations and added again.
#include "kernels/nm_matmul/nm_matmul.h"
#include "neon_octet.h"

namespace {

struct Vec : OctetVec {
  static TWOFOUR_INLINE ints dot(ints sum, uint8x16_t x, const Octet& w) {
    const uint8x16_t chosen = vqtbl1q_u8(x, w.places);
    // x - 128 fits a signed byte; 128 times the weights comes back as 64 twice.
    const int8x16_t shifted = vreinterpretq_s8_u8(veorq_u8(chosen, vdupq_n_u8(0x80)));
    const int8x16_t half = vdupq_n_s8(64);
    return (ints)vdotq_s32(vdotq_s32(vdotq_s32((int32x4_t)sum, w.values, shifted), w.values, half), w.values, half);
  }
};

}  // namespace

namespace twofour {

int64_t nm_matmul_2x4_int8_rows__neon_dotprod__workspace(const Matmul& a) { return row_octets_workspace<Vec>(a); }
void nm_matmul_2x4_int8_rows__neon_dotprod(const Matmul& a) { row_octets<Vec>(a); }

}  // namespace twofour
