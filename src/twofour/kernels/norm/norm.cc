// The rows, once for every instruction set.
#include "rows.h"

namespace twofour {

void TWOFOUR_HERE(norm_f32_rows)(const Norm& a, int64_t begin, int64_t end) { norm_rows<float>(a, begin, end); }
void TWOFOUR_HERE(norm_bf16_rows)(const Norm& a, int64_t begin, int64_t end) { norm_rows<uint16_t>(a, begin, end); }

}  // namespace twofour
