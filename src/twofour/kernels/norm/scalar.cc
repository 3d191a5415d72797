// The portable row.
#include "native/vector_scalar.h"
#include "rows.h"

namespace twofour {

void norm_f32_rows__scalar(const Norm& a, int64_t begin, int64_t end) { NormRows<Floats>::run(a, begin, end); }

}  // namespace twofour
