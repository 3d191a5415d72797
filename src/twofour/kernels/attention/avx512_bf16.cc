// The AVX512-BF16 row: pairs of bfloat16 are multiplied and added at once. The weights of the values are rounded to
// bfloat16, their sum is that of the unrounded ones.
#include "pair_cells.h"
#include "rows.h"

namespace {

using Kernel = Rows<FloatCells<uint16_t>, Blocks<PairCells, 6, 4>, Blocks<PairCells, 12, 2>>;

}  // namespace

namespace twofour {

int64_t attention_bf16_pairs__avx512_bf16__workspace(const Attention& a) { return Kernel::bytes(a); }
void attention_bf16_pairs__avx512_bf16(const Attention& a, int64_t begin, int64_t end, void* workspace) {
  Kernel::run(a, begin, end, workspace);
}

}  // namespace twofour
