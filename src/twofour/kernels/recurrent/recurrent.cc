// The row, once for every instruction set.
#include "recurrent.h"

#include "gates.h"
#include "native/simd.h"

namespace twofour {

void TWOFOUR_HERE(recurrent_f32)(Cell cell, const Gates& step) { run_gates<Lanes>(cell, step); }

}  // namespace twofour
