// The float32 rows, for each instruction set of block_matmul.inc.
#include "block_matmul.h"
#include "kernels/dword_dots.h"
#include "panels.h"
#include "rows.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(block_matmul_f32_rows)(const Matmul& a) { return block_rows_workspace<FloatDots<Lanes>>(a); }
void TWOFOUR_HERE(block_matmul_f32_rows)(const Matmul& a) { block_rows<FloatDots<Lanes>>(a); }

int64_t TWOFOUR_WORKSPACE_HERE(block_matmul_f32_panels)(const Matmul& a) {
  return block_panels_workspace<FloatDots<Lanes>>(a);
}
void TWOFOUR_HERE(block_matmul_f32_panels)(const Matmul& a) { block_panels<FloatDots<Lanes>>(a); }

}  // namespace twofour
