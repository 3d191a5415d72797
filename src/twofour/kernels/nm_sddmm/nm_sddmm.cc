// The float32 row, once for every instruction set.
#include "native/simd.h"
#include "sampled.h"

namespace twofour {

void TWOFOUR_HERE(nm_sddmm_2x4_f32)(const NmSddmm& a) {
  if (a.bf16) sample<Lanes, Singles<Lanes, uint16_t>>(a);
  else sample<Lanes, Singles<Lanes, float>>(a);
}

}  // namespace twofour
