// The AVX2 + FMA rows.
#include "native/lanes_avx2.h"
#include "row_blocks.h"
#include "row_pairs.h"
#include "token_panels.h"

namespace {

struct Vec : Lanes {
  static constexpr int panel_sums = 8;
  static constexpr int row_halves = 1, row_tokens = 4, row_sums = 8;
};

}  // namespace

namespace twofour {

#define TWOFOUR_PANEL_ROW(symbol, Weights, Wide, Group)                                                             \
  int64_t symbol##__workspace(const NmMatmul& a) { return panel_product_workspace<Vec, Wide, Group>(a); }           \
  void symbol(const NmMatmul& a) { panel_product<Vec, Weights, Wide, Group>(a); }
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_panels__avx2, BlockWeights, 8, 1)
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_panels_blocked__avx2, BlockWeights, 8, 8)
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_pairs__avx2, PairWeights, 4, 1)
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_pairs_blocked__avx2, PairWeights, 4, 16)
#undef TWOFOUR_PANEL_ROW

int64_t nm_matmul_2x4_f32_rows__avx2__workspace(const NmMatmul& a) { return row_blocks_workspace<Vec>(a); }
void nm_matmul_2x4_f32_rows__avx2(const NmMatmul& a) { row_blocks<Vec>(a); }

}  // namespace twofour
