// The NEON rows: bfloat16 widened to float32 in the register.
#include "neon.h"

#include "panels.h"
#include "rows.h"

namespace twofour {

int64_t nm_matmul_2x4_bf16_rows__neon__workspace(const NmMatmul& a) {
  return row_blocks_workspace<FloatGroups<Vec>>(a);
}
void nm_matmul_2x4_bf16_rows__neon(const NmMatmul& a) { row_blocks<FloatGroups<Vec>, FetchTwice>(a); }

int64_t nm_matmul_2x4_bf16_panels__neon__workspace(const NmMatmul& a) {
  return panel_product_workspace<FloatPanel<Vec>, 4, 1>(a);
}
void nm_matmul_2x4_bf16_panels__neon(const NmMatmul& a) { panel_product<FloatPanel<Vec>, 4, 1>(a); }

}  // namespace twofour
