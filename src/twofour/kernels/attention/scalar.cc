// The portable row.
#include "native/vector_scalar.h"
#include "rows.h"

namespace {

using Kernel = Rows<Floats, Blocks<Floats, 4, 2>, Blocks<Floats, 4, 2>>;

}  // namespace

namespace twofour {

int64_t attention_f32_blocks__scalar__workspace(const Attention& a) { return Kernel::bytes(a); }

void attention_f32_blocks__scalar(const Attention& a, int64_t begin, int64_t end, void* workspace) {
  Kernel::run(a, begin, end, workspace);
}

}  // namespace twofour
