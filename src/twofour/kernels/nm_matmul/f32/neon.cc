// The NEON rows.
#include "native/lanes_neon.h"
#include "row_blocks.h"
#include "row_pairs.h"
#include "token_panels.h"

namespace {

// Of 32 registers 16 hold sums.
struct Vec : Lanes {
  static constexpr int panel_sums = 16;
  static constexpr int row_halves = 1, row_tokens = 4, row_sums = 16;
};

}  // namespace

namespace twofour {

#define TWOFOUR_PANEL_ROW(symbol, Weights, Wide, Group)                                                             \
  int64_t symbol##__workspace(const NmMatmul& a) { return panel_product_workspace<Vec, Wide, Group>(a); }           \
  void symbol(const NmMatmul& a) { panel_product<Vec, Weights, Wide, Group>(a); }
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_panels__neon, BlockWeights, 8, 1)
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_pairs__neon, PairWeights, 4, 1)
#undef TWOFOUR_PANEL_ROW

int64_t nm_matmul_2x4_f32_rows__neon__workspace(const NmMatmul& a) { return row_blocks_workspace<Vec>(a); }
void nm_matmul_2x4_f32_rows__neon(const NmMatmul& a) { row_blocks<Vec>(a); }

}  // namespace twofour
