// The bfloat16 rows, for each instruction set of block_matmul.inc: pairs are multiplied by vdpbf16ps, which adds both
// products with round to nearest and takes denormals for zero, else as floats.
#include "block_matmul.h"
#include "native/simd.h"
#include "panels.h"
#include "real_dots.h"
#include "rows.h"

namespace {

#if defined(TWOFOUR_SET_avx512_bf16)
struct Dots : WidenedDots<Lanes> {
  static TWOFOUR_INLINE __m512 dot(__m512 sum, __m512 x, __m512 w) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
  }
};
#else
using Dots = WidenedDots<Lanes>;
#endif

}  // namespace

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(block_matmul_bf16_rows)(const Matmul& a) { return block_rows_workspace<Dots>(a); }
void TWOFOUR_HERE(block_matmul_bf16_rows)(const Matmul& a) { block_rows<Dots>(a); }

int64_t TWOFOUR_WORKSPACE_HERE(block_matmul_bf16_panels)(const Matmul& a) { return block_panels_workspace<Dots>(a); }
void TWOFOUR_HERE(block_matmul_bf16_panels)(const Matmul& a) { block_panels<Dots>(a); }

}  // namespace twofour
