// The rows of avx512_vnni, whose bytes of windows one permutation finds.
#include "block_matmul.h"
#include "blocks.h"
#include "windows.h"

namespace twofour {

int64_t block_matmul_int8_rows__avx512_vbmi__workspace(const Matmul& a) { return block_matmul_int8_rows__avx512_vnni__workspace(a); }
void block_matmul_int8_rows__avx512_vbmi(const Matmul& a) { block_int8_rows(a, kKeepers); }

}  // namespace twofour
