// The tile registers of AMX. Eight of them, 16 rows of 64 bytes: 0-3 hold sums, 4-5 activations, 6-7 weights.
#pragma once

#include <cstdint>

#include "native/compiler.h"

namespace {

// Rows of the activations' and sums' tiles; the weights' always have 16. Written as assembly because gcc 12's
// _tile_loadconfig tells the compiler of 8 of the 64 bytes that it reads, and its _tile_loadd of none.
class TileUnit {
 public:
  explicit TileUnit(int64_t rows) {
    struct alignas(64) Configuration {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } wanted;
    static_assert(sizeof(Configuration) == 64);
    for (int t = 0; t < 8; t++) wanted.rows[t] = static_cast<uint8_t>(t < 6 ? rows : 16);
    asm volatile("ldtilecfg %0" ::"m"(wanted) : "memory");
  }
  ~TileUnit() { asm volatile("tilerelease"); }  // a thread with live tiles pays 8 KB at every context switch
  TileUnit(const TileUnit&) = delete;
  TileUnit& operator=(const TileUnit&) = delete;

  template <int tile>
  static TWOFOUR_INLINE void load(const void* p) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(int64_t{64}), "i"(tile) : "memory");
  }
  template <int tile>
  static TWOFOUR_INLINE void store(void* p) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(int64_t{64}), "i"(tile) : "memory");
  }
  template <int tile>
  static TWOFOUR_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
  }
};

}  // namespace
