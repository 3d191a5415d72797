// From the sizes of a layout to the template that is made for them. Internal linkage.
#pragma once

#include "blocks.h"
#include "native/compiler.h"

namespace {

template <int number>
struct Constant {
  static constexpr int value = number;
};

template <class D, int S, class Use>
TWOFOUR_INLINE void with_run(const BlockShape& shape, const Use& use) {
  if constexpr (D::per > 1) {
    if (shape.run == 0) return use(Constant<S>{}, Constant<0>{});
  }
  if (shape.run == 16) return use(Constant<S>{}, Constant<16>{});
  if (shape.run == 4) return use(Constant<S>{}, Constant<4>{});
  use(Constant<S>{}, Constant<1>{});
}

// Calls use(rows of a strip, dwords of a run) with objects whose values are the layout's.
template <class D, class Use>
TWOFOUR_INLINE void with_shape(const BlockShape& shape, const Use& use) {
  switch (shape.strip) {
    case 16: return with_run<D, 16>(shape, use);
    case 8: return with_run<D, 8>(shape, use);
    case 4: return with_run<D, 4>(shape, use);
    case 2: return with_run<D, 2>(shape, use);
    default: return with_run<D, 1>(shape, use);
  }
}

}  // namespace
