// The tile registers of AMX: eight of up to 16 rows of up to 64 bytes, and the unit that multiplies them.
//
// With TWOFOUR_EMULATE_TILES (make test-amx) the unit is a program: rows of kernels that use tiles run on any CPU with
// AVX512-BF16 and VBMI2, to the bit in whole numbers, and their results can be checked where no CPU has AMX.
#pragma once

#include <cstdint>
#include <cstring>

#include "native/compiler.h"

namespace {

// What is loaded by ldtilecfg (Intel SDM, volume 1, table 18-1).
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

#ifndef TWOFOUR_EMULATE_TILES

// Written as assembly because gcc 12's _tile_loadconfig tells the compiler of 8 of the 64 bytes that it reads, and its
// _tile_loadd of none.
class TileUnit {
 public:
  explicit TileUnit(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
  ~TileUnit() { asm volatile("tilerelease"); }  // a thread with live tiles pays 8 KB at every context switch
  TileUnit(const TileUnit&) = delete;
  TileUnit& operator=(const TileUnit&) = delete;

  template <int tile>
  static TWOFOUR_INLINE void load(const void* p, int64_t stride = 64) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(tile) : "memory");
  }
  template <int tile>
  static TWOFOUR_INLINE void store(void* p) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(int64_t{64}), "i"(tile) : "memory");
  }
  template <int tile>
  static TWOFOUR_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
  }
  // sum += x w: bytes, x without or with a sign, w with or without; bfloat16.
  template <int sum, int x, int w>
  static TWOFOUR_INLINE void dot_us() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(x), "i"(w));
  }
  template <int sum, int x, int w>
  static TWOFOUR_INLINE void dot_su() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(x), "i"(w));
  }
  template <int sum, int x, int w>
  static TWOFOUR_INLINE void dot_ss() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(x), "i"(w));
  }
  template <int sum, int x, int w>
  static TWOFOUR_INLINE void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(x), "i"(w));
  }
};

#else

// The same in memory of the thread, by the pseudocode of Intel's SDM, volume 2. A tile that is not configured, or of other
// rows than a product wants, ends the process, as the unit faults.
class TileUnit {
 public:
  explicit TileUnit(const TileShapes& shapes) {
    now() = {};
    now().shapes = shapes;
    for (int t = 0; t < 8; t++) require(shapes.rows[t] <= 16 && shapes.row_bytes[t] <= 64);
  }
  ~TileUnit() { now().shapes = {}; }
  TileUnit(const TileUnit&) = delete;
  TileUnit& operator=(const TileUnit&) = delete;

  template <int tile>
  static void load(const void* p, int64_t stride = 64) {
    std::memset(now().bytes[tile], 0, sizeof now().bytes[tile]);
    for (int r = 0; r < rows(tile); r++)
      std::memcpy(now().bytes[tile][r], static_cast<const char*>(p) + r * stride, static_cast<size_t>(width(tile)));
  }
  template <int tile>
  static void store(void* p) {
    for (int r = 0; r < rows(tile); r++)
      std::memcpy(static_cast<char*>(p) + r * 64, now().bytes[tile][r], static_cast<size_t>(width(tile)));
  }
  template <int tile>
  static void zero() {
    require(rows(tile) > 0);
    std::memset(now().bytes[tile], 0, sizeof now().bytes[tile]);
  }
  template <int sum, int x, int w>
  static void dot_us() {
    bytes<uint8_t, int8_t>(sum, x, w);
  }
  template <int sum, int x, int w>
  static void dot_su() {
    bytes<int8_t, uint8_t>(sum, x, w);
  }
  template <int sum, int x, int w>
  static void dot_ss() {
    bytes<int8_t, int8_t>(sum, x, w);
  }
  template <int sum, int x, int w>
  static void dot_bf16() {
    each<float, uint16_t, uint16_t>(sum, x, w, [](float* to, const uint16_t* a, const uint16_t* b) {
      for (int i = 0; i < 2; i++) *to += wide(a[i]) * wide(b[i]);
    });
  }

 private:
  struct State {
    TileShapes shapes;
    alignas(64) uint8_t bytes[8][16][64];
  };
  static State& now() {
    static thread_local State state{};
    return state;
  }
  static void require(bool right) {
    if (!right) __builtin_trap();
  }
  static int rows(int tile) {
    require(now().shapes.palette == 1 && now().shapes.rows[tile] > 0);
    return now().shapes.rows[tile];
  }
  static int width(int tile) { return now().shapes.row_bytes[tile]; }
  static float wide(uint16_t bits) {
    const uint32_t word = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
  template <class X, class W>
  static void bytes(int sum, int x, int w) {
    each<uint32_t, X, W>(sum, x, w, [](uint32_t* to, const X* a, const W* b) {
      for (int i = 0; i < 4; i++) *to += static_cast<uint32_t>(int32_t{a[i]} * int32_t{b[i]});
    });
  }
  // add(sum, four bytes of x, four of w) for every sum and every four: `x` has a row a row of `sum`, `w` a row every four.
  template <class Sum, class X, class W>
  static void each(int sum, int x, int w, void (*add)(Sum*, const X*, const W*)) {
    require(rows(sum) == rows(x) && width(sum) == width(w) && width(x) == 4 * rows(w));
    for (int m = 0; m < rows(sum); m++)
      for (int k = 0; k < rows(w); k++)
        for (int n = 0; n < width(sum) / 4; n++)
          add(reinterpret_cast<Sum*>(now().bytes[sum][m]) + n, reinterpret_cast<const X*>(now().bytes[x][m] + 4 * k),
              reinterpret_cast<const W*>(now().bytes[w][k] + 4 * n));
  }
};

#endif

}  // namespace
