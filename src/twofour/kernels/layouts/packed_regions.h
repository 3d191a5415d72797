// A packed weight of two regions as it came through the border.
#pragma once

#include "packed_weight.h"
#include "regions.h"

namespace twofour {

constexpr size_t kDual = sizeof("dual_") - 1;  // of its layout's name, before that of the 2:4 weight in it

// Whether there are as many bytes as the header, the number of dense groups and the layout say.
inline bool regions_fit(const PackedWeight& packed, const char* layout) {
  const WeightShape shape = packed.shape();
  if (!packed.sizes() || shape.in % kGroup != 0 || packed.behind() < 64) return false;
  const int64_t dense = Regions{packed.bytes()}.dense();
  if (dense < 0 || dense > shape.in / kGroup) return false;
  const int64_t held = layout_called(layout + kDual)->bytes({shape.out, shape.in + kGroup * dense, 0, false});
  return Regions::head(dense) + held == packed.behind();
}

}  // namespace twofour
