// The AVX2 row.
#include "native/vector_avx2.h"
#include "rows.h"

namespace {

using Kernel = Rows<Floats, Blocks<Floats, 3, 4>, Blocks<Floats, 6, 2>>;

}  // namespace

namespace twofour {

int64_t attention_f32_blocks__avx2__workspace(const Attention& a) { return Kernel::bytes(a); }

void attention_f32_blocks__avx2(const Attention& a, int64_t begin, int64_t end, void* workspace) {
  Kernel::run(a, begin, end, workspace);
}

}  // namespace twofour
