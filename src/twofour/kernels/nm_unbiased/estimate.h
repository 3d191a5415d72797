// One group of four tokens in each lane of a vector, lanes along the gradient's columns: the choice of README.md, then a
// transpose of registers into the rows of the layout. V: vectors of floats (reg, transpose) and the GCC and clang types
// F, I of the same size. Included once per instruction-set file; internal linkage.
//
// No product feeds a sum here, so that no compiler fuses them: every instruction set makes the same choices.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/nm_matmul/bf16/bf16_layout.h"
#include "kernels/nm_matmul/f32/f32_layout.h"
#include "native/compiler.h"
#include "native/whole.h"
#include "nm_unbiased.h"

namespace {

using twofour::kPanelRows;
using twofour::kPanelTile;
using twofour::NmUnbiased;
static_assert(kPanelRows == twofour::kBf16PanelRows && kPanelTile == twofour::kBf16PanelTile);

constexpr int kGroups = kPanelTile / 4;

// Uniform in [0, 1) from a counter: the finaliser of MurmurHash3, 24 bits of it.
template <class V>
TWOFOUR_INLINE typename V::F uniform(uint32_t first, uint32_t seed) {
  typename V::U x = (V::lanes() + first) * 0x9e3779b1u + seed;
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  x = x ^ x >> 16;
  return __builtin_convertvector((typename V::I)(x >> 8), typename V::F) * 0x1p-24f;
}

template <class V>
TWOFOUR_INLINE typename V::F magnitude(typename V::F x) {
  return (typename V::F)((typename V::I)x & 0x7fffffff);
}
template <class V>
TWOFOUR_INLINE typename V::F smaller(typename V::F a, typename V::F b) {
  return a < b ? a : b;
}

template <class V>
struct Chosen {
  typename V::I first, second;   // positions, ascending
  typename V::F values[2];
};

// What stands for x where its group keeps x: the expectation is x.
template <class V>
TWOFOUR_INLINE typename V::F scaled(typename V::F x, typename V::F least) {
  const typename V::F a = magnitude<V>(x), larger = a > least ? a : least;
  const typename V::I sign = (typename V::I)x & static_cast<int32_t>(0x80000000u);
  const typename V::F value = (typename V::F)((typename V::I)larger | sign);
  return a == 0.0f ? typename V::F{} : value;
}

template <class V>
TWOFOUR_INLINE Chosen<V> choose(const typename V::F (&x)[4], typename V::F u) {
  using F = typename V::F;
  using I = typename V::I;
  const F a = magnitude<V>(x[0]), b = magnitude<V>(x[1]), c = magnitude<V>(x[2]), d = magnitude<V>(x[3]);
  const F ab = a + b, cd = c + d, sum = ab + cd;
  const F rest = smaller<V>(smaller<V>(b + cd, a + cd), smaller<V>(ab + d, ab + c));  // without the largest
  F half = smaller<V>(sum * 0.5f, rest);
  half = sum == sum ? half : sum;  // a NaN stays one
  const F tiny = F{} + 0x1p-126f, cap = half > tiny ? half : tiny;
  const F c0 = smaller<V>(a, cap), c1 = c0 + smaller<V>(b, cap), c2 = c1 + smaller<V>(c, cap);
  const F at = u * half;
  I first = -((c0 <= at) + (c1 <= at) + (c2 <= at));
  I second = -((c0 - half <= at) + (c1 - half <= at) + (c2 - half <= at));
  first = first > 2 ? I{} + 2 : first;
  second = second > first ? second : first + 1;
  const F one = first == 0 ? x[0] : first == 1 ? x[1] : x[2];
  const F two = second == 1 ? x[1] : second == 2 ? x[2] : x[3];
  return {first, second, {scaled<V>(one, half), scaled<V>(two, half)}};
}

// One number of `count` columns; the lanes past them are zero.
template <class V>
TWOFOUR_INLINE typename V::F load_columns(const NmUnbiased& a, int64_t token, int64_t column, int64_t count) {
  typename V::F x{};
  const int64_t at = token * a.stride + column;
  if (a.bf16) {
    typename V::H half{};
    const auto* from = static_cast<const uint16_t*>(a.gradient) + at;
    if (count >= V::width) std::memcpy(&half, from, sizeof half);
    else for (int64_t i = 0; i < count; i++) half[i] = from[i];
    return (typename V::F)(__builtin_convertvector(half, typename V::U) << 16);
  }
  const float* from = static_cast<const float*>(a.gradient) + at;
  if (count >= V::width) std::memcpy(&x, from, sizeof x);
  else for (int64_t i = 0; i < count; i++) x[i] = from[i];
  return x;
}

// Two floats as the lower and the upper half of a dword, rounded to bfloat16; a NaN stays one.
template <class V>
TWOFOUR_INLINE typename V::U as_bf16(typename V::F x) {
  const typename V::U bits = (typename V::U)x;
  const typename V::U even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
  return x == x ? even : quiet;
}

// One tile of the packed rows: where rows and values stand.
struct TileRows {
  uint8_t* meta;
  uint8_t* values;
  int64_t value_bytes;  // of a row
};

// 64 tokens from `token` on of columns [column, column + count), into rows of a tile.
template <class V, bool kToBf16>
TWOFOUR_INLINE void pack_tile(const NmUnbiased& a, int64_t token, int64_t column, int64_t count, const TileRows& to) {
  constexpr int vectors = kToBf16 ? kGroups : 2 * kGroups;  // dwords of a row
  typename V::F kept[vectors];
  typename V::U meta[2]{};
  for (int g = 0; g < kGroups; g++) {
    typename V::U code = typename V::U{} + 4u;  // (0, 1), with zeros, past the tokens
    typename V::F values[2]{};
    if (token + 4 * g < a.tokens) {
      typename V::F x[4];
      TWOFOUR_UNROLL
      for (int i = 0; i < 4; i++) x[i] = load_columns<V>(a, token + 4 * g + i, column, count);
      const auto counter = static_cast<uint32_t>((token / 4 + g) * a.rows + column);
      const Chosen<V> chosen = choose<V>(x, uniform<V>(counter, a.seed));
      const typename V::U ascending = (typename V::U)(chosen.first | chosen.second << 2);
      const typename V::U falling = (typename V::U)(chosen.second | chosen.first << 2);
      const typename V::I turned = kToBf16 ? ascending != 4 : typename V::I{};
      code = turned ? falling : ascending;
      values[0] = turned ? chosen.values[1] : chosen.values[0];
      values[1] = turned ? chosen.values[0] : chosen.values[1];
    }
    meta[g / 8] |= code << (4 * (g % 8));
    if constexpr (kToBf16) kept[g] = (typename V::F)(as_bf16<V>(values[0]) | as_bf16<V>(values[1]) << 16);
    else kept[2 * g] = values[0], kept[2 * g + 1] = values[1];
  }
  for (int64_t r = 0; r < least(count, V::width); r++) {
    const uint32_t words[2] = {meta[0][r], meta[1][r]};
    std::memcpy(to.meta + r * 8, words, 8);
  }
  for (int v = 0; v < vectors; v += V::width) {
    typename V::reg t[V::width];
    TWOFOUR_UNROLL
    for (int i = 0; i < V::width; i++) t[i] = (typename V::reg)kept[v + i];
    V::transpose(t);
    for (int64_t r = 0; r < least(count, V::width); r++)
      V::store_unaligned(reinterpret_cast<float*>(to.values + r * to.value_bytes + v * 4), t[r]);
  }
}

template <class V, bool kToBf16>
TWOFOUR_INLINE void pack_rows(const NmUnbiased& a) {
  constexpr int64_t value_bytes = kPanelTile / 2 * (kToBf16 ? 2 : 4);
  for (int64_t first = a.begin; first < a.end; first += kPanelRows) {
    const int64_t rows = least(kPanelRows, a.rows - first), meta_bytes = round_up(rows * 8, 64);
    auto* tile = static_cast<uint8_t*>(a.packed) + first * ceil_div(a.tokens, kPanelTile) * (8 + value_bytes);
    for (int64_t token = 0; token < a.tokens; token += kPanelTile, tile += meta_bytes + rows * value_bytes) {
      for (int64_t r = rows * 8; r < meta_bytes; r++) tile[r] = 0;
      for (int64_t r = 0; r < rows; r += V::width)
        pack_tile<V, kToBf16>(a, token, first + r, rows - r,
                              {tile + r * 8, tile + meta_bytes + r * value_bytes, value_bytes});
    }
  }
}

template <class V>
TWOFOUR_INLINE void estimate(const NmUnbiased& a) {
  if (a.to_bf16) pack_rows<V, true>(a);
  else pack_rows<V, false>(a);
}

}  // namespace
