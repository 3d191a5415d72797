// The row with USDOT, which multiplies unsigned activations by signed weights.
#include "kernels/nm_matmul/nm_matmul.h"
#include "neon_octet.h"

namespace {

struct Vec : OctetVec {
  static TWOFOUR_INLINE ints dot(ints sum, uint8x16_t x, const Octet& w) {
    const uint8x16_t chosen = vqtbl1q_u8(x, w.places);
    return (ints)vusdotq_s32((int32x4_t)sum, chosen, w.values);
  }
};

}  // namespace

namespace twofour {

int64_t nm_matmul_2x4_int8_rows__neon_i8mm__workspace(const Matmul& a) { return row_octets_workspace<Vec>(a); }
void nm_matmul_2x4_int8_rows__neon_i8mm(const Matmul& a) { row_octets<Vec>(a); }

}  // namespace twofour
