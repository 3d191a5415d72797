// The inner step of float32 products with the layout "panels": vectors hold neighbours of the dense side, a kept value is
// one broadcast, and its 2-bit index one address. Included once per instruction set; internal linkage.
#pragma once

#include <cstdint>

#include "kernels/layouts/panels.h"
#include "native/compiler.h"

namespace {

using twofour::kPanelTile;

constexpr int64_t kStep = 16;  // inputs per unrolled step: 8 kept weights, 16 bits of metadata

// Vectors between two panel rows for a panel that uses `used` of them: the next power of two, so that an input becomes
// an address by shifting.
constexpr int panel_stride(int used) { return used <= 1 ? 1 : used <= 2 ? 2 : used <= 4 ? 4 : 8; }
constexpr int log2_of(int64_t n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

// Rows whose sums fill the registers meant for them; four keep enough independent chains for the narrow panels.
template <class V>
constexpr int panel_rows(int stride) {
  return V::sums / stride < 4 ? V::sums / stride : 4;
}

// `bits` turned left by `count`: with BMI2 one instruction that leaves its source alone, where a shift
// needs a copy.
TWOFOUR_INLINE uint64_t turned(uint64_t bits, int count) {
  count = count & 63;
  return count == 0 ? bits : bits << count | bits >> (64 - count);
}

// Where the kept values of rows stand: of neighbours in a tile, and of rows anywhere.
struct RowsTogether {
  const float* first;
  TWOFOUR_INLINE const float* operator[](int row) const { return first + row * (kPanelTile / 2); }
};
template <int R>
struct RowsApart {
  const float* at[R];
  TWOFOUR_INLINE const float* operator[](int row) const { return at[row]; }
};

// 16 inputs of R rows: 8 kept values each, against U vectors of the panel's rows from x on.
template <class V, int U, int R, class Values>
TWOFOUR_INLINE void add_step(const Values& values, const char* x, const uint64_t (&meta)[R],
                             typename V::reg (&acc)[R][U]) {
  constexpr int64_t stride = panel_stride(U) * V::width * 4;
  constexpr int shift = log2_of(stride);
  TWOFOUR_UNROLL
  for (int n = 0; n < 8; n++) {
    TWOFOUR_UNROLL
    for (int r = 0; r < R; r++) {
      const char* row = x + (turned(meta[r], shift - 2 * n) & (uint64_t{3} << shift)) + n / 2 * 4 * stride;
      asm("" : "+r"(row));  // one base register: an FMA with an indexed operand splits in two on Intel (1 to 5 %)
      const typename V::reg w = V::broadcast(values[r] + n);
      TWOFOUR_UNROLL
      for (int u = 0; u < U; u++) acc[r][u] = V::fma(w, reinterpret_cast<const float*>(row) + u * V::width, acc[r][u]);
    }
  }
}

}  // namespace
