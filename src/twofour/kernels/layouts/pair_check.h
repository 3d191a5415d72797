// Whether a pair of the layout "pairs" says only what its kernels can address. Other layouts need no such look: each of
// their codes, whatever it is, selects an input that is there.
#pragma once

#include <cstdint>

#include "kernels/damaged.h"
#include "pairs.h"
#include "native/compiler.h"

namespace {

// head: two rows of the domain and how many inputs they share, even; record: its 64 inputs stand behind the values. Two
// loads and three branches that are never taken, for a record of some 400 instructions.
template <class V>
TWOFOUR_INLINE bool sound_pair(const uint8_t* head, const char* record, int64_t pairs) {
  const bool rows = head[0] < 2 * pairs && head[1] < 2 * pairs;
  return rows && head[2] <= twofour::kPanelTile / 2 && head[2] % 2 == 0 &&
         V::all_below_64(reinterpret_cast<const uint8_t*>(record + twofour::kPanelTile * 4));
}

}  // namespace
