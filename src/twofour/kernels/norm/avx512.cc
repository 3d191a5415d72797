// The AVX-512 rows.
#include "native/vector_avx512.h"
#include "rows.h"

namespace twofour {

void norm_f32_rows__avx512(const Norm& a, int64_t begin, int64_t end) { norm_rows<Floats, float>(a, begin, end); }
void norm_bf16_rows__avx512(const Norm& a, int64_t begin, int64_t end) { norm_rows<Floats, uint16_t>(a, begin, end); }

}  // namespace twofour
