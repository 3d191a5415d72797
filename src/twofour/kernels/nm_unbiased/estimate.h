// One group of four tokens in each lane of a vector, lanes along the gradient's columns: unbiased_choice.h, then a
// transpose of registers into the rows of the layout. Included once per instruction set; internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/layouts/panels.h"
#include "kernels/unbiased_choice.h"
#include "native/compiler.h"
#include "native/integers.h"
#include "nm_unbiased.h"

namespace {

using twofour::kPanelRows;
using twofour::kPanelTile;
using twofour::NmUnbiased;

constexpr int kGroups = kPanelTile / 4;

// One number of `count` columns; the lanes past them are zero.
template <class V>
TWOFOUR_INLINE typename V::F load_columns(const NmUnbiased& a, int64_t token, int64_t column, int64_t count) {
  const int64_t at = token * a.stride + column;
  if (a.bf16) return V::load(static_cast<const uint16_t*>(a.gradient) + at, count);
  return V::load(static_cast<const float*>(a.gradient) + at, count);
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
  using Block = PanelBlock<kToBf16 ? 2 : 4, uint8_t>;
  for (int64_t first = a.begin; first < a.end; first += kPanelRows) {
    const Block block(static_cast<uint8_t*>(a.packed), first, a.rows, a.tokens);
    for (int64_t token = 0; token < a.tokens; token += kPanelTile) {
      const int64_t tile = token / kPanelTile;
      for (uint8_t* to = block.meta(tile, block.rows); to < block.values(tile, 0); to++) *to = 0;
      for (int64_t r = 0; r < block.rows; r += V::width)
        pack_tile<V, kToBf16>(a, token, first + r, block.rows - r,
                              {block.meta(tile, r), block.values(tile, r), Block::kRowBytes});
    }
  }
}

template <class V>
TWOFOUR_INLINE void estimate(const NmUnbiased& a) {
  if (a.to_bf16) pack_rows<V, true>(a);
  else pack_rows<V, false>(a);
}

}  // namespace
