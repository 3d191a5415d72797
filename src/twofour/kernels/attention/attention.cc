// The rows, once for every instruction set: blocks of queries by vectors of keys that fill its registers.
#include "rows.h"

namespace {

#if defined(TWOFOUR_SET_avx512)
constexpr int kWideRows = 6, kWideColumns = 4, kNarrowRows = 12;
#elif defined(TWOFOUR_SET_avx2)
constexpr int kWideRows = 3, kWideColumns = 4, kNarrowRows = 6;
#else
constexpr int kWideRows = 4, kWideColumns = 2, kNarrowRows = 4;
#endif

template <class Number>
using Kernel = Rows<FloatCells<Number>, Blocks<FloatCells<Number>, kWideRows, kWideColumns>,
                    Blocks<FloatCells<Number>, kNarrowRows, 2>>;

}  // namespace

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(attention_f32_blocks)(const Attention& a) { return Kernel<float>::bytes(a); }
void TWOFOUR_HERE(attention_f32_blocks)(const Attention& a, int64_t begin, int64_t end, void* workspace) {
  Kernel<float>::run(a, begin, end, workspace);
}

int64_t TWOFOUR_WORKSPACE_HERE(attention_bf16_blocks)(const Attention& a) { return Kernel<uint16_t>::bytes(a); }
void TWOFOUR_HERE(attention_bf16_blocks)(const Attention& a, int64_t begin, int64_t end, void* workspace) {
  Kernel<uint16_t>::run(a, begin, end, workspace);
}

}  // namespace twofour
