// The bfloat16 rows, for each instruction set of dense_matmul.inc.
#include "panels.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(dense_matmul_bf16_panels)(const Matmul& a) {
  return dword_panels_workspace<PairDots<Lanes>>(a);
}
void TWOFOUR_HERE(dense_matmul_bf16_panels)(const Matmul& a) { dword_panels<PairDots<Lanes>>(a); }

}  // namespace twofour
