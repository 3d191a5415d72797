// The arrays of kernels and layouts, from the same rows that declare them.
#include <cstring>

#include "layout.h"
#include "nm_matmul.h"

namespace twofour {

#define TWOFOUR_NM_LAYOUT(name, dtype, refill) \
  static constexpr Layout k_##name##_layout{                    \
      #name, dtype, name##_layout__bytes, name##_layout__pack, name##_layout__unpack, refill};
#include "layout.inc"
#undef TWOFOUR_NM_LAYOUT

const Layout* layout_called(const char* name) {
#define TWOFOUR_NM_LAYOUT(name, dtype, refill) &k_##name##_layout,
  static constexpr const Layout* kLayouts[] = {
#include "layout.inc"
  };
#undef TWOFOUR_NM_LAYOUT
  for (const Layout* layout : kLayouts)
    if (std::strcmp(layout->name, name) == 0) return layout;
  return nullptr;
}

#define TWOFOUR_ROW(symbol, isa, pattern, dtype, layout, least, most)                                   \
  {{#symbol, "nm_matmul", isa, pattern, dtype, layout, least, most}, symbol##__workspace, symbol, layout_called(layout)},
const NmMatmulKernel kNmMatmulKernels[] = {
#include "nm_matmul.inc"
};
#undef TWOFOUR_ROW

const int kNmMatmulKernelCount = static_cast<int>(sizeof(kNmMatmulKernels) / sizeof(kNmMatmulKernels[0]));

}  // namespace twofour
