// The AVX-512 rows.
#include "native/lanes_avx512.h"
#include "row_blocks.h"
#include "row_pairs.h"
#include "row_spread.h"
#include "token_panels.h"

namespace {

struct Vec : Lanes {
  static constexpr int panel_sums = 16;
  static constexpr int row_halves = 2, row_tokens = 8, row_sums = 16;
  static reg broadcast4_unaligned(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
};

}  // namespace

namespace twofour {

#define TWOFOUR_PANEL_ROW(symbol, Weights, Wide, Group, PassBytes)                                                 \
  int64_t symbol##__workspace(const NmMatmul& a) { return panel_product_workspace<Vec, Wide, Group, PassBytes>(a); } \
  void symbol(const NmMatmul& a) { panel_product<Vec, Weights, Wide, Group, PassBytes>(a); }
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_panels__avx512, BlockWeights, 8, 1, kPanelL1Bytes)
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_panels_blocked__avx512, BlockWeights, 8, 4, kPanelL1Bytes)
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_panels_narrow__avx512, BlockWeights, 4, 1, kNarrowL1Bytes)
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_pairs__avx512, PairWeights, 8, 1, kPanelL1Bytes)
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_pairs_blocked__avx512, PairWeights, 8, 4, kPanelL1Bytes)
#undef TWOFOUR_PANEL_ROW

int64_t nm_matmul_2x4_f32_rows__avx512__workspace(const NmMatmul& a) { return row_blocks_workspace<Vec>(a); }
void nm_matmul_2x4_f32_rows__avx512(const NmMatmul& a) { row_blocks<Vec, FetchTwice>(a); }
int64_t nm_matmul_2x4_f32_rows_near__avx512__workspace(const NmMatmul& a) { return row_blocks_workspace<Vec>(a); }
void nm_matmul_2x4_f32_rows_near__avx512(const NmMatmul& a) { row_blocks<Vec, FetchOnce>(a); }
int64_t nm_matmul_2x4_f32_rows_spread__avx512__workspace(const NmMatmul& a) { return row_spread_workspace<Vec>(a); }
void nm_matmul_2x4_f32_rows_spread__avx512(const NmMatmul& a) { row_spread<Vec>(a); }

}  // namespace twofour
