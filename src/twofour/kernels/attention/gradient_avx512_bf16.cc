// The AVX512-BF16 row of gradients: pairs of bfloat16 are multiplied and added at once, P and dS rounded before.
#include "gradient_blocks.h"
#include "pair_cells.h"

namespace {

using Gradient = GradientRows<GradientBlocks<PairCells, 6, 4>, GradientBlocks<PairCells, 12, 2>>;

}  // namespace

namespace twofour {

int64_t attention_gradient_bf16_pairs__avx512_bf16__workspace(const AttentionGradient& g) { return Gradient::bytes(g); }
void attention_gradient_bf16_pairs__avx512_bf16(const AttentionGradient& g, int64_t begin, int64_t end, void* workspace) {
  Gradient::run(g, begin, end, workspace);
}

}  // namespace twofour
