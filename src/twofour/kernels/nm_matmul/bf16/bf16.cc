// The rows whose products are of floats: bfloat16 is widened in the register. Once for every instruction set.
#include "kernels/nm_matmul/nm_matmul.h"
#include "native/simd.h"
#include "panels.h"
#include "rows.h"

namespace twofour {
namespace {

constexpr int kWide = Lanes::width == 16 ? 8 : 4;

}  // namespace

int64_t TWOFOUR_WORKSPACE_HERE(nm_matmul_2x4_bf16_rows)(const Matmul& a) {
  return row_blocks_workspace<FloatGroups<Lanes>>(a);
}
void TWOFOUR_HERE(nm_matmul_2x4_bf16_rows)(const Matmul& a) { row_blocks<FloatGroups<Lanes>, FetchTwice>(a); }
#if defined(TWOFOUR_SET_avx2)
int64_t TWOFOUR_WORKSPACE_HERE(nm_matmul_2x4_bf16_rows_stream)(const Matmul& a) {
  return row_blocks_workspace<FloatGroups<Lanes>>(a);
}
void TWOFOUR_HERE(nm_matmul_2x4_bf16_rows_stream)(const Matmul& a) { row_blocks<FloatGroups<Lanes>, FetchNone>(a); }
#endif

int64_t TWOFOUR_WORKSPACE_HERE(nm_matmul_2x4_bf16_panels)(const Matmul& a) {
  return panel_product_workspace<FloatPanel<Lanes>, kWide, 1>(a);
}
void TWOFOUR_HERE(nm_matmul_2x4_bf16_panels)(const Matmul& a) { panel_product<FloatPanel<Lanes>, kWide, 1>(a); }

}  // namespace twofour
