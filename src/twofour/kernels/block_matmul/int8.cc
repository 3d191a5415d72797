// The int8 rows, for each instruction set of block_matmul.inc.
#include "block_matmul.h"
#include "kernels/dword_dots.h"
#include "panels.h"
#include "rows.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(block_matmul_int8_rows)(const Matmul& a) { return block_rows_workspace<ByteDots>(a); }
void TWOFOUR_HERE(block_matmul_int8_rows)(const Matmul& a) { block_rows<ByteDots>(a); }
#if defined(TWOFOUR_SET_avx512_vnni)
void block_int8_rows(const Matmul& a, const Keepers& keepers) { block_rows<ByteDots>(a, keepers); }
#endif

int64_t TWOFOUR_WORKSPACE_HERE(block_matmul_int8_panels)(const Matmul& a) { return block_panels_workspace<ByteDots>(a); }
void TWOFOUR_HERE(block_matmul_int8_panels)(const Matmul& a) { block_panels<ByteDots>(a); }

}  // namespace twofour
