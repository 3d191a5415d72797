// The rows, once for every instruction set, and those that one of them has alone.
#include "kernels/nm_matmul/nm_matmul.h"
#include "native/simd.h"
#if defined(TWOFOUR_SET_avx2)
#include "few_panels.h"
#endif
#include "row_blocks.h"
#include "row_pairs.h"
#include "row_spread.h"
#include "token_panels.h"

namespace twofour {
namespace {

constexpr int kPanelWide = Lanes::sums == 4 ? 4 : 8, kPairWide = Lanes::width == 16 ? 8 : 4;

}  // namespace

int64_t TWOFOUR_WORKSPACE_HERE(nm_matmul_2x4_f32_rows)(const Matmul& a) { return row_blocks_workspace<Lanes>(a); }
void TWOFOUR_HERE(nm_matmul_2x4_f32_rows)(const Matmul& a) { row_blocks<Lanes, FetchTwice>(a); }
#if defined(TWOFOUR_SET_avx2)
int64_t TWOFOUR_WORKSPACE_HERE(nm_matmul_2x4_f32_rows_stream)(const Matmul& a) { return row_blocks_workspace<Lanes>(a); }
void TWOFOUR_HERE(nm_matmul_2x4_f32_rows_stream)(const Matmul& a) { row_blocks<Lanes, FetchNone>(a); }
int64_t TWOFOUR_WORKSPACE_HERE(nm_matmul_2x4_f32_panels_few)(const Matmul& a) { return FewPlan(a).bytes(a); }
void TWOFOUR_HERE(nm_matmul_2x4_f32_panels_few)(const Matmul& a) { few_panels(a); }
#endif
#if defined(TWOFOUR_SET_avx512)
int64_t TWOFOUR_WORKSPACE_HERE(nm_matmul_2x4_f32_rows_near)(const Matmul& a) { return row_blocks_workspace<Lanes>(a); }
void TWOFOUR_HERE(nm_matmul_2x4_f32_rows_near)(const Matmul& a) { row_blocks<Lanes, FetchOnce>(a); }
int64_t TWOFOUR_WORKSPACE_HERE(nm_matmul_2x4_f32_rows_spread)(const Matmul& a) { return row_spread_workspace<Lanes>(a); }
void TWOFOUR_HERE(nm_matmul_2x4_f32_rows_spread)(const Matmul& a) { row_spread<Lanes>(a); }
#endif

#define TWOFOUR_PANEL_ROW(name, Weights, ...)                                                                       \
  int64_t TWOFOUR_WORKSPACE_HERE(name)(const Matmul& a) { return panel_product_workspace<Lanes, __VA_ARGS__>(a); } \
  void TWOFOUR_HERE(name)(const Matmul& a) { panel_product<Lanes, Weights, __VA_ARGS__>(a); }
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_panels, BlockWeights, kPanelWide, 1)
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_pairs, PairWeights, kPairWide, 1)
#if defined(TWOFOUR_SET_avx512)
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_panels_blocked, BlockWeights, 8, 4)
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_panels_narrow, BlockWeights, 4, 1, kNarrowL1Bytes)
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_pairs_blocked, PairWeights, 8, 4)
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_pairs_narrow, PairWeights, 4, 1, kNarrowL1Bytes)
#elif defined(TWOFOUR_SET_avx2)
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_panels_blocked, BlockWeights, 8, 8)
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_pairs_blocked, PairWeights, 4, 16)
#endif
#undef TWOFOUR_PANEL_ROW

}  // namespace twofour
