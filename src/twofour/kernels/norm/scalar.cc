// The portable rows.
#include "native/vector_scalar.h"
#include "rows.h"

namespace twofour {

void norm_f32_rows__scalar(const Norm& a, int64_t begin, int64_t end) { norm_rows<Floats, float>(a, begin, end); }
void norm_bf16_rows__scalar(const Norm& a, int64_t begin, int64_t end) { norm_rows<Floats, uint16_t>(a, begin, end); }

}  // namespace twofour
