// How much a row-vectorised kernel holds in registers at once, and how its weights are fetched. Internal linkage.
#pragma once

#include <cstdint>

#include "native/compiler.h"

namespace {

// Halves (16 rows) of a unit of 32, and tokens, at most.
template <class V>
constexpr int kRowHalves = V::width == 16 ? 2 : 1;
template <class V>
constexpr int kRowTokens = V::width == 16 ? 8 : 4;

// How weights are fetched ahead while one stream of them is read once: into L2 and then into L1 (the far one covers the
// latency of DRAM; one prefetch into L1 is held back by its 16 fill buffers), or once. Intel (Granite Rapids class), 8
// tokens from DRAM: 87 GFLOP/s twice, 77 into L2 only, 64 with none. Zen 5: once and nearer takes 0.7 to 0.93 of the
// time of twice; into L1 alone (not kept in L2) 0.9 of that in a whole decoding step, whose other code and data then
// stay in L2.
template <int kNear>
struct FetchNearAndFar {
  static constexpr bool in_order = false;
  template <class V>
  static TWOFOUR_INLINE void fetch(const void* p, int64_t) {
    V::prefetch(p, kNear, 16384);
  }
};
struct FetchOnce {
  static constexpr bool in_order = false;
  template <class V>
  static TWOFOUR_INLINE void fetch(const void* p, int64_t) {
    __builtin_prefetch(static_cast<const char*>(p) + 4096, 0, 0);
  }
};
// Not at all: line after line is read, one half of a unit after the other, which the hardware follows; of halves side by
// side it loses track at every unit. Zen 4, one token from DRAM: 30 GB/s, as much as reading alone; 11 with halves side by
// side, 15 fetched twice, 11 once.
struct FetchNone {
  static constexpr bool in_order = true;
  template <class V>
  static TWOFOUR_INLINE void fetch(const void*, int64_t) {}
};

}  // namespace
