// The AMX row of the dense int4 weight: half bytes become the lines of tiles.
#include "kernels/dense_matmul/dense_matmul.h"
#include "kernels/int4/tiles.h"

namespace {

using twofour::kInt4DenseBlockBytes;

struct Dense {
  static constexpr int64_t kBlockBytes = kInt4DenseBlockBytes;
  static constexpr bool kOffset = true;  // weights are 0..15; their zero points come off the sums
  static constexpr int64_t kFar = 32 * kInt4DenseBlockBytes, kNear = 8 * kInt4DenseBlockBytes;

  // 16 rows x 32 inputs -> 8 lines of 16 rows x 4 inputs.
  static TWOFOUR_INLINE void expand(const uint8_t* half, __m512i, uint8_t* to) {
    const __m512i nibble = _mm512_set1_epi8(15);
    TWOFOUR_UNROLL
    for (int s = 0; s < 4; s++) {
      prefetch<kNear, kFar>(half + s * 64);
      const __m512i line = _mm512_loadu_si512(half + s * 64);
      _mm512_store_si512(to + 2 * s * 64, _mm512_and_si512(line, nibble));
      _mm512_store_si512(to + (2 * s + 1) * 64, _mm512_and_si512(_mm512_srli_epi16(line, 4), nibble));
    }
  }
  template <int sum, int x, int w>
  static TWOFOUR_INLINE void dot() {
    TileUnit::dot_su<sum, x, w>();
  }
};

}  // namespace

namespace twofour {

int64_t dense_matmul_int4_rows__amx__workspace(const Matmul& a) { return piece_product_workspace(a); }
void dense_matmul_int4_rows__amx(const Matmul& a) { piece_product<Dense>(a); }

}  // namespace twofour
