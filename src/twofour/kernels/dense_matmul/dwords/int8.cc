// The int8 rows, for each instruction set of dense_matmul.inc.
#include "panels.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(dense_matmul_int8_panels)(const Matmul& a) { return dword_panels_workspace<ByteDots>(a); }
void TWOFOUR_HERE(dense_matmul_int8_panels)(const Matmul& a) { dword_panels<ByteDots>(a); }

}  // namespace twofour
