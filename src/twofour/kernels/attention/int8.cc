// The rows that compute in whole numbers, once for every instruction set of them. Up to three queries of floats are left to floats.
#include "byte_blocks.h"

namespace {

#if defined(TWOFOUR_SET_avx512)
using Blocked = ByteBlocks<12>;
#elif defined(TWOFOUR_SET_avx2)
using Blocked = ByteBlocks<6>;
#else
using Blocked = ByteBlocks<4>;
#endif
using Few = FewQueries<FloatCells<uint16_t>>;
inline bool few(const Attention& a) { return a.queries <= kFewQueries && a.units == nullptr; }

}  // namespace

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(attention_int8_blocks)(const Attention& a) {
  return few(a) ? Few::bytes(a) : Blocked::bytes(a);
}
void TWOFOUR_HERE(attention_int8_blocks)(const Attention& a, int64_t begin, int64_t end, void* workspace) {
  if (few(a)) Few::run(a, begin, end, static_cast<float*>(workspace));
  else Blocked::run(a, begin, end, workspace);
}

}  // namespace twofour
