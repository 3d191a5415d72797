// The int8 rows, for each instruction set of block_matmul.inc: bytes are widened where no instruction multiplies them.
// vpmaddubsw would saturate (255 * 127 * 2 > 32767).
#include "block_matmul.h"
#include "panels.h"
#include "rows.h"
#include "whole_dots.h"

namespace {

struct Dots : WholeDots {
  static TWOFOUR_INLINE Sum dot(Sum sum, V::reg x, V::reg w) {
#if defined(TWOFOUR_SET_avx512_vnni)
    return _mm512_dpbusd_epi32(sum, (__m512i)x, (__m512i)w);
#elif defined(TWOFOUR_SET_avx2)
    const auto inputs = (__m256i)x, weights = (__m256i)w;
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(inputs, _mm256_set1_epi16(0xff)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(weights, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(inputs, 8), _mm256_srai_epi16(weights, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
#else
    const auto inputs = (V::U)x;
    const auto weights = (V::I)w;
    V::I products = (V::I)(inputs >> 24) * (weights >> 24);
    TWOFOUR_UNROLL
    for (int e = 0; e < 3; e++) products += (V::I)(inputs >> 8 * e & 0xff) * (weights << (24 - 8 * e) >> 24);
    return add(sum, (Sum)products);
#endif
  }
};

}  // namespace

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(block_matmul_int8_rows)(const Matmul& a) { return block_rows_workspace<Dots>(a); }
void TWOFOUR_HERE(block_matmul_int8_rows)(const Matmul& a) { block_rows<Dots>(a); }

int64_t TWOFOUR_WORKSPACE_HERE(block_matmul_int8_panels)(const Matmul& a) { return block_panels_workspace<Dots>(a); }
void TWOFOUR_HERE(block_matmul_int8_panels)(const Matmul& a) { block_panels<Dots>(a); }

}  // namespace twofour
