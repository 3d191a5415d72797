// The AVX-512 rows.
#include "native/vector_avx512.h"
#include "rows.h"

namespace {

template <class Number>
using Cells = FloatCells<Floats, Number>;
template <class Number>
using Kernel = Rows<Cells<Number>, Blocks<Cells<Number>, 6, 4>, Blocks<Cells<Number>, 12, 2>>;

}  // namespace

namespace twofour {

int64_t attention_f32_blocks__avx512__workspace(const Attention& a) { return Kernel<float>::bytes(a); }
void attention_f32_blocks__avx512(const Attention& a, int64_t begin, int64_t end, void* workspace) {
  Kernel<float>::run(a, begin, end, workspace);
}

int64_t attention_bf16_blocks__avx512__workspace(const Attention& a) { return Kernel<uint16_t>::bytes(a); }
void attention_bf16_blocks__avx512(const Attention& a, int64_t begin, int64_t end, void* workspace) {
  Kernel<uint16_t>::run(a, begin, end, workspace);
}

}  // namespace twofour
