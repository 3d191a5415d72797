// The array of layouts, from the same rows that declare them.
#include <cstring>

#include "layout.h"

namespace twofour {

#define TWOFOUR_NM_LAYOUT(name, dtype, columns, refill) \
  static constexpr Layout k_##name##_layout{                    \
      #name, dtype, name##_layout__bytes, name##_layout__pack, name##_layout__unpack, columns, refill};
#include "layout.inc"
#undef TWOFOUR_NM_LAYOUT

const Layout* layout_called(const char* name) {
#define TWOFOUR_NM_LAYOUT(name, ...) &k_##name##_layout,
  static constexpr const Layout* kLayouts[] = {
#include "layout.inc"
  };
#undef TWOFOUR_NM_LAYOUT
  for (const Layout* layout : kLayouts)
    if (std::strcmp(layout->name, name) == 0) return layout;
  return nullptr;
}

}  // namespace twofour
