// Rows of a gradient, pruned and written where they belong. Included once per instruction set; internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "groups.h"
#include "kernels/derivative.h"
#include "kernels/layouts/panels.h"
#include "native/integers.h"
#include "tasks.h"

namespace {

using twofour::kPanelTile;
using twofour::NmGradient;

constexpr int64_t kBundle = 8;  // rows at a time: the metadata of as many fill a line
constexpr uint64_t kNoGroups = 0x4444444444444444;  // past the columns: the pair (0, 1)

template <class V>
constexpr int kVectors = static_cast<int>(kPanelTile / 4 / V::width);  // of groups in a tile

// 4 * width numbers, one group in each lane.
template <class V, class T>
TWOFOUR_INLINE void load_groups(const T* from, typename V::F (&x)[4]) {
  using F = typename V::F;
  F v[4];
  TWOFOUR_UNROLL
  for (int i = 0; i < 4; i++) v[i] = V::load_unaligned(from + i * V::width);
  const F e0 = V::evens(v[0], v[1]), o0 = V::odds(v[0], v[1]), e1 = V::evens(v[2], v[3]), o1 = V::odds(v[2], v[3]);
  x[0] = V::evens(e0, e1), x[1] = V::evens(o0, o1), x[2] = V::odds(e0, e1), x[3] = V::odds(o0, o1);
}

// The inverse of load_groups.
template <class V, class T>
TWOFOUR_INLINE void store_groups(T* to, const typename V::F (&y)[4]) {
  using F = typename V::F;
  const F a = V::lows(y[0], y[2]), b = V::lows(y[1], y[3]), c = V::highs(y[0], y[2]), d = V::highs(y[1], y[3]);
  V::store_unaligned(to, V::lows(a, b));
  V::store_unaligned(to + V::width, V::highs(a, b));
  V::store_unaligned(to + 2 * V::width, V::lows(c, d));
  V::store_unaligned(to + 3 * V::width, V::highs(c, d));
}

// What stays of `width` groups as the layouts want it; returns their nibbles, lowest first.
template <class V>
TWOFOUR_INLINE uint64_t store_kept(float* to, const Chosen<V>& kept) {
  V::store_unaligned(to, V::lows(kept.values[0], kept.values[1]));
  V::store_unaligned(to + V::width, V::highs(kept.values[0], kept.values[1]));
  return V::nibbles((typename V::ireg)(kept.first | kept.second << 2));
}
template <class V>
TWOFOUR_INLINE uint64_t store_kept(uint16_t* to, const Chosen<V>& kept) {
  using U = typename V::U;
  const U ascending = (U)(kept.first | kept.second << 2), falling = (U)(kept.second | kept.first << 2);
  const U one = as_bf16<V>(kept.values[0]), two = as_bf16<V>(kept.values[1]);
  const auto turned = ascending != twofour::kBf16AscendingCode;
  const U pairs = turned ? (two | one << 16) : (one | two << 16);
  std::memcpy(to, &pairs, sizeof pairs);
  return V::nibbles((typename V::ireg)(turned ? falling : ascending));
}

// Sums of |g| and of what stays of it, per column in the order of load_groups; the factors take their place.
struct TileSums {
  float before[kPanelTile], after[kPanelTile];
};

// One tile of one row: 64 columns, or fewer in a buffer with zeros behind them. T: the gradient's type.
template <class V, GradientMode mode, class T>
TWOFOUR_INLINE uint64_t pack_row(const T* from, uint32_t group, uint32_t seed, const float* factors, T* values) {
  uint64_t meta = 0;
  TWOFOUR_UNROLL
  for (int v = 0; v < kVectors<V>; v++) {
    typename V::F x[4];
    load_groups<V>(from + v * 4 * V::width, x);
    const auto kept = keep_two<V, mode>(x, group + v * V::width, seed, factors + v * 4 * V::width);
    meta |= store_kept<V>(values + v * 2 * V::width, kept) << (4 * V::width * v & 63);
  }
  return meta;
}
template <class V, GradientMode mode, class T>
TWOFOUR_INLINE void spread_row(const T* from, uint32_t group, uint32_t seed, const float* factors, T* to) {
  TWOFOUR_UNROLL
  for (int v = 0; v < kVectors<V>; v++) {
    typename V::F x[4], y[4];
    load_groups<V>(from + v * 4 * V::width, x);
    spread<V>(keep_two<V, mode>(x, group + v * V::width, seed, factors + v * 4 * V::width), y);
    store_groups<V>(to + v * 4 * V::width, y);
  }
}

// dL/dz of rows [row, stop) where it is made here, along tiles [t0, t1): their pruning reads it from the caches.
template <class V, class T>
TWOFOUR_NOINLINE void make_rows(const NmGradient& a, int64_t row, int64_t stop, int64_t t0, int64_t t1) {
  const int64_t columns = least(a.columns, t1 * kPanelTile) - t0 * kPanelTile;
  with_activation(a.from.activation, [&](auto constant) {
    constexpr auto kind = decltype(constant)::value;
    if constexpr (kind != twofour::Activation::none)
      for (int64_t at = row * a.columns + t0 * kPanelTile; row < stop; row++, at += a.columns)
        through_activation<kind, V>(static_cast<const T*>(a.from.upstream) + at, static_cast<const T*>(a.from.at) + at,
                                    static_cast<T*>(a.from.gradient) + at, columns);
  });
}

// Rows [begin, end) of the gradient, which lie in one sample, and tiles [t0, t1).
template <class V, GradientMode mode, class T>
struct Run {
  const NmGradient& a;
  int64_t begin, end, t0, t1;
  TileSums sums[mode == GradientMode::rescaled ? kTaskTiles : 1];

  int64_t left(int64_t tile) const { return a.columns - tile * kPanelTile; }
  // 64 numbers; the last ones of a row come from a buffer that ends with zeros.
  TWOFOUR_INLINE const T* numbers(int64_t row, int64_t tile, T (&buffer)[kPanelTile]) const {
    const T* from = static_cast<const T*>(a.gradient) + row * a.stride + tile * kPanelTile;
    if (left(tile) >= kPanelTile) return from;
    std::memset(buffer, 0, sizeof buffer);
    std::memcpy(buffer, from, static_cast<size_t>(left(tile)) * sizeof(T));
    return buffer;
  }
  TWOFOUR_INLINE uint32_t group(int64_t row, int64_t tile) const {
    return static_cast<uint32_t>(row * (a.columns / 4) + tile * (kPanelTile / 4));
  }

  // The sums of a bundle are formed apart: a chain of additions is an eighth as long as the sample.
  TWOFOUR_INLINE void add_sums(int64_t row, int64_t stop, int64_t tile) {
    using F = typename V::F;
    T buffer[kPanelTile];
    F before[kVectors<V>][4]{}, after[kVectors<V>][4]{};
    for (; row < stop; row++) {
      const T* from = numbers(row, tile, buffer);
      TWOFOUR_UNROLL
      for (int v = 0; v < kVectors<V>; v++) {
        F x[4], y[4];
        load_groups<V>(from + v * 4 * V::width, x);
        spread<V>(largest_two<V>(x, x), y);
        TWOFOUR_UNROLL
        for (int i = 0; i < 4; i++) before[v][i] += magnitude<V>(x[i]), after[v][i] += magnitude<V>(y[i]);
      }
    }
    TileSums& to = sums[tile - t0];
    for (int v = 0; v < kVectors<V>; v++)
      for (int i = 0; i < 4; i++) {
        const int at = (v * 4 + i) * V::width;
        V::store_unaligned(to.before + at, V::load_unaligned(to.before + at) + before[v][i]);
        V::store_unaligned(to.after + at, V::load_unaligned(to.after + at) + after[v][i]);
      }
  }

  // before / (after + eps) in the place of `before`; 0 for a column of which nothing stays.
  void to_factors() {
    for (int64_t t = 0; t < t1 - t0; t++)
      for (int64_t i = 0; i < kPanelTile; i++) {
        const float kept = sums[t].after[i];
        sums[t].before[i] = kept == 0.0f ? 0.0f : sums[t].before[i] / (kept + a.eps);
      }
  }

  using Block = PanelBlock<sizeof(T), uint8_t>;
  TWOFOUR_INLINE void pack(const Block& block, int64_t row, int64_t stop, int64_t tile) const {
    T buffer[kPanelTile];
    for (; row < stop; row++) {
      uint8_t* to = block.meta(tile, row - block.first);
      auto* values = reinterpret_cast<T*>(block.values(tile, row - block.first));
      uint64_t meta = pack_row<V, mode>(numbers(row, tile, buffer), group(row, tile), a.seed, factors(tile), values);
      if (left(tile) < kPanelTile) {
        const uint64_t real = (uint64_t{1} << left(tile)) - 1;  // a nibble for four columns
        meta = (meta & real) | (kNoGroups & ~real);
      }
      std::memcpy(to, &meta, 8);
      if (row + 1 == block.first + block.rows)
        std::memset(to + 8, 0, static_cast<size_t>(block.meta_bytes - block.rows * 8));
    }
  }
  TWOFOUR_INLINE void write(int64_t row, int64_t stop, int64_t tile) const {
    T buffer[kPanelTile], last[kPanelTile];
    for (; row < stop; row++) {
      T* to = static_cast<T*>(a.out) + row * a.columns + tile * kPanelTile;
      const bool whole = left(tile) >= kPanelTile;
      spread_row<V, mode>(numbers(row, tile, buffer), group(row, tile), a.seed, factors(tile), whole ? to : last);
      if (!whole) std::memcpy(to, last, static_cast<size_t>(left(tile)) * sizeof(T));
    }
  }
  TWOFOUR_INLINE const float* factors(int64_t tile) const {
    return mode == GradientMode::rescaled ? sums[tile - t0].before : nullptr;
  }

  TWOFOUR_INLINE void sum() {
    for (int64_t row = begin; row < end; row += kBundle) {
      make_rows<V, T>(a, row, least(row + kBundle, end), t0, t1);
      for (int64_t tile = t0; tile < t1; tile++) add_sums(row, least(row + kBundle, end), tile);
    }
    to_factors();
  }
  TWOFOUR_NOINLINE void operator()() {
    if constexpr (mode == GradientMode::rescaled) sum();
    static_assert(twofour::kPanelRows % kBundle == 0, "the rows of a bundle lie in one block");
    for (int64_t row = begin; row < end;) {
      const int64_t stop = least(row / kBundle * kBundle + kBundle, end);
      if constexpr (mode != GradientMode::rescaled) make_rows<V, T>(a, row, stop, t0, t1);
      if (a.packed) {
        const Block block(static_cast<uint8_t*>(a.out), row, a.samples * a.tokens, a.columns);
        for (int64_t tile = t0; tile < t1; tile++) pack(block, row, stop, tile);
      } else if (a.out != nullptr) {
        for (int64_t tile = t0; tile < t1; tile++) write(row, stop, tile);
      }
      row = stop;
    }
  }
};

template <class V, GradientMode mode>
TWOFOUR_NOINLINE void prune_mode(const NmGradient& a) {
  const GradientTasks tasks(a);
  const int64_t tiles = ceil_div(a.columns, kPanelTile);
  for (int64_t task = a.begin; task < a.end; task++) {
    const int64_t tile = task % tasks.tile_runs * tasks.tiles, run = task / tasks.tile_runs;
    const int64_t sample = run / tasks.row_runs, row = run % tasks.row_runs * tasks.rows;
    const int64_t begin = sample * a.tokens + row, end = sample * a.tokens + least(row + tasks.rows, a.tokens);
    const int64_t stop = least(tile + tasks.tiles, tiles);
    if (a.bf16) Run<V, mode, uint16_t>{a, begin, end, tile, stop, {}}();
    else Run<V, mode, float>{a, begin, end, tile, stop, {}}();
  }
}

template <class V>
TWOFOUR_INLINE void prune_gradient(const NmGradient& a) {
  switch (a.mode) {
    case GradientMode::magnitude: return prune_mode<V, GradientMode::magnitude>(a);
    case GradientMode::rescaled: return prune_mode<V, GradientMode::rescaled>(a);
    case GradientMode::random: return prune_mode<V, GradientMode::random>(a);
    case GradientMode::unbiased: return prune_mode<V, GradientMode::unbiased>(a);
  }
}

}  // namespace
