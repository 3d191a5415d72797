// The AVX2 row.
#include <immintrin.h>

#include "float_rows.h"

namespace {

struct Vec {
  using reg = __m256;
  static constexpr int width = 8, tokens = 4;

  static reg broadcast4(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }
  template <class I>
  static reg permute4(reg x, I i) {
    return _mm256_permutevar_ps(x, (__m256i)i);
  }
};

}  // namespace

namespace twofour {

int64_t nm_matmul_2x4_int4_rows__avx2__workspace(const NmMatmul& a) { return Int4Floats<Vec>::workspace(a); }
void nm_matmul_2x4_int4_rows__avx2(const NmMatmul& a) { Int4Floats<Vec>::run(a); }

}  // namespace twofour
