// The rows of gradients, once for every instruction set.
#include "gradient_blocks.h"

namespace {

#if defined(TWOFOUR_SET_avx512)
constexpr int kWideRows = 6, kWideColumns = 4, kNarrowRows = 12;
#elif defined(TWOFOUR_SET_avx2)
constexpr int kWideRows = 3, kWideColumns = 4, kNarrowRows = 6;
#else
constexpr int kWideRows = 4, kWideColumns = 2, kNarrowRows = 4;
#endif

template <class Number>
using Gradient = GradientRows<GradientBlocks<FloatCells<Number>, kWideRows, kWideColumns>,
                              GradientBlocks<FloatCells<Number>, kNarrowRows, 2>>;

}  // namespace

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(attention_gradient_f32_blocks)(const AttentionGradient& g) { return Gradient<float>::bytes(g); }
void TWOFOUR_HERE(attention_gradient_f32_blocks)(const AttentionGradient& g, int64_t begin, int64_t end, void* workspace) {
  Gradient<float>::run(g, begin, end, workspace);
}

int64_t TWOFOUR_WORKSPACE_HERE(attention_gradient_bf16_blocks)(const AttentionGradient& g) {
  return Gradient<uint16_t>::bytes(g);
}
void TWOFOUR_HERE(attention_gradient_bf16_blocks)(const AttentionGradient& g, int64_t begin, int64_t end, void* workspace) {
  Gradient<uint16_t>::run(g, begin, end, workspace);
}

}  // namespace twofour
