// The AVX-512 VNNI row of the dense int4 weight: activations are broadcast four at a time, nothing is permuted.
#include "kernels/dense_matmul/dense_matmul.h"
#include "kernels/int4/row_products.h"

namespace {

using twofour::kInt4DenseBlockBytes;
using twofour::kInt4DenseHalfBytes;

struct Dense {
  static constexpr int64_t kBlockBytes = kInt4DenseBlockBytes;
  static constexpr bool kUnsigned = false;  // weights are 0..15; their zero points come off the sums
  static constexpr int64_t kFar = 32 * kInt4DenseBlockBytes, kNear = 8 * kInt4DenseBlockBytes;

  template <int T, int Halves>
  static TWOFOUR_INLINE void add_block(const uint8_t* block, const uint8_t* x, const __m512i (&)[Halves],
                                       __m512i (&high)[Halves][T], __m512i (&low)[Halves][T]) {
    const __m512i nibble = _mm512_set1_epi8(15);
    TWOFOUR_UNROLL
    for (int s = 0; s < 4; s++) {
      __m512i w[Halves][2];
      TWOFOUR_UNROLL
      for (int h = 0; h < Halves; h++) {
        const uint8_t* at = block + h * kInt4DenseHalfBytes + s * 64;
        _mm_prefetch(reinterpret_cast<const char*>(at) + kFar, _MM_HINT_T1);
        _mm_prefetch(reinterpret_cast<const char*>(at) + kNear, _MM_HINT_T0);
        const __m512i line = _mm512_loadu_si512(at);
        w[h][0] = _mm512_and_si512(line, nibble);
        w[h][1] = _mm512_and_si512(_mm512_srli_epi16(line, 4), nibble);
      }
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) {
        const auto* four = reinterpret_cast<const int*>(x + (s * T + t) * 16);
        TWOFOUR_UNROLL
        for (int g = 0; g < 2; g++) {
          TWOFOUR_UNROLL
          for (int h = 0; h < Halves; h++) {
            high[h][t] = _mm512_dpbusd_epi32(high[h][t], w[h][g], _mm512_set1_epi32(four[g]));
            low[h][t] = _mm512_dpbusd_epi32(low[h][t], w[h][g], _mm512_set1_epi32(four[2 + g]));
          }
        }
      }
    }
  }
};

}  // namespace

namespace twofour {

int64_t dense_matmul_int4_rows__avx512_vnni__workspace(const Matmul& a) { return row_products_workspace(a); }
void dense_matmul_int4_rows__avx512_vnni(const Matmul& a) { row_products<Dense>(a); }

}  // namespace twofour
