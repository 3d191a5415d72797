// The AVX-512 row.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12's own _mm512_undefined_ps
#endif
#include <immintrin.h>

#include "float_rows.h"

namespace {

struct Vec {
  using reg = __m512;
  static constexpr int width = 16, tokens = 8;

  static reg broadcast4(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
  template <class I>
  static reg permute4(reg x, I i) {
    return _mm512_permutevar_ps(x, (__m512i)i);
  }
};

}  // namespace

namespace twofour {

int64_t nm_matmul_2x4_int4_rows__avx512__workspace(const NmMatmul& a) { return Int4Floats<Vec>::workspace(a); }
void nm_matmul_2x4_int4_rows__avx512(const NmMatmul& a) { Int4Floats<Vec>::run(a); }

}  // namespace twofour
