// The AVX2 row.
#include "native/vector_avx2.h"
#include "rows.h"

namespace twofour {

void norm_f32_rows__avx2(const Norm& a, int64_t begin, int64_t end) { NormRows<Floats>::run(a, begin, end); }

}  // namespace twofour
