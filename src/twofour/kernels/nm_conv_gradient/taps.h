// The sum over taps: for each tap the weight as a panel (out channels x a run of in channels), and for each pixel of dL/dx the
// row of dL/dz that the tap brings it. Nothing is scattered and no columns are made: each pixel's sums are its own.
// Included once per instruction set; internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/panel_steps.h"
#include "native/integers.h"
#include "native/team.h"
#include "nm_conv_gradient.h"

namespace {

using twofour::ConvAxis;
using twofour::NmConvGradient;

constexpr int64_t kPassBytes = 32768;  // of panels, which stay in L1 while the pixels of a chunk pass over them
constexpr int64_t kChunk = 512;        // pixels: with their sums and a tile of their gradients they stay in L2

// A pixel of a chunk, and the row of dL/dz that a tap brings it: where its first tile stands.
struct Reached {
  const char* meta;
  int64_t tile_bytes;
  int32_t values;  // bytes from the metadata to the values
  int32_t pixel;
};

inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

template <class V>
struct TapPlan {
  static constexpr int wide = V::sums == 4 ? 4 : 8;
  int64_t vectors, channels, tiles, taps, pixels, chunk, panel_floats, sums_floats, threads;

  explicit TapPlan(const NmConvGradient& a) {
    const int64_t all = ceil_div(a.in_channels, V::width);
    vectors = ceil_div(all, ceil_div(all, wide));
    channels = vectors * V::width;
    tiles = ceil_div(a.out_channels, kPanelTile);
    taps = a.height.taps * a.width.taps;
    pixels = a.images * a.height.input * a.width.input;
    threads = a.threads > 1 ? a.threads : 1;
    const int64_t share = most(ceil_div(pixels, threads), 1);
    chunk = round_up(ceil_div(share, ceil_div(share, kChunk)), 16);
    panel_floats = taps * tiles * kPanelTile * stride();
    sums_floats = chunk * stride();
  }
  int64_t stride() const { return panel_stride(static_cast<int>(vectors)) * V::width; }
  int64_t reached_bytes() const { return round_up(taps * chunk * static_cast<int64_t>(sizeof(Reached)), 64); }
  int64_t member_bytes() const { return sums_floats * 4 + reached_bytes() + round_up((taps + 1) * 8, 64); }
  int64_t bytes(const NmConvGradient&) const { return panel_floats * 4 + threads * member_bytes(); }
};

// What one member works in.
template <class V>
struct TapMember {
  float* sums;
  Reached* reached;
  int64_t* until;  // reached [until[tap], until[tap + 1]) are of that tap

  TapMember(const NmConvGradient& a, const TapPlan<V>& plan, int64_t me) {
    char* at = static_cast<char*>(a.workspace) + plan.panel_floats * 4 + me * plan.member_bytes();
    sums = reinterpret_cast<float*>(at);
    reached = reinterpret_cast<Reached*>(at + plan.sums_floats * 4);
    until = reinterpret_cast<int64_t*>(at + plan.sums_floats * 4 + plan.reached_bytes());
  }
};

// The weight of outputs [begin, end) of all taps in turn, counted through; channels past the last are zero, as are outputs.
template <class V>
TWOFOUR_NOINLINE void pack_taps(const NmConvGradient& a, const TapPlan<V>& plan, int64_t first, int64_t begin, int64_t end,
                                float* panels) {
  const int64_t rows = plan.tiles * kPanelTile, count = least(plan.channels, a.in_channels - first), stride = plan.stride();
  for (int64_t o = begin; o < end; o++)
    for (int64_t tap = 0; tap < plan.taps; tap++) {
      float* to = panels + (tap * rows + o) * stride;
      const float* from = a.weight + o * a.out_stride + first * a.in_stride + tap / a.width.taps * a.height_stride +
                          tap % a.width.taps * a.width_stride;
      if (o >= a.out_channels) {
        std::memset(to, 0, static_cast<size_t>(plan.channels) * 4);
        continue;
      }
      if (a.in_stride == 1) std::memcpy(to, from, static_cast<size_t>(count) * 4);
      else
        for (int64_t c = 0; c < count; c++) to[c] = from[c * a.in_stride];
      for (int64_t c = count; c < plan.channels; c++) to[c] = 0;
    }
}

// Pixels [begin, end) of dL/dx that lie under tap (h, w) of some window, and what it brings them; returns the end of the list.
TWOFOUR_NOINLINE Reached* reach(const NmConvGradient& a, int64_t begin, int64_t end, int64_t h, int64_t w, Reached* to) {
  const ConvAxis &down = a.height, &across = a.width;
  const int64_t above = h * down.dilation - down.padding, left = w * across.dilation - across.padding;
  const int64_t rows = a.images * down.output * across.output;
  for (int64_t line = begin / across.input; line * across.input < end; line++) {
    const int64_t image = line / down.input, y = line % down.input - above;
    if (y < 0 || y % down.stride != 0 || y / down.stride >= down.output) continue;
    const int64_t first = line * across.input, from = most(begin - first, 0), stop = least(end - first, across.input);
    const int64_t row = (image * down.output + y / down.stride) * across.output;
    for (int64_t o = ceil_div(most(from - left, 0), across.stride); o < across.output; o++) {
      const int64_t x = o * across.stride + left;
      if (x >= stop) break;
      const PanelBlock<4, const char> block(a.gradient, row + o, rows, a.out_channels);
      const int64_t r = row + o - block.first;
      const char* meta = block.meta(0, r);
      *to++ = {meta, block.tile_bytes, static_cast<int32_t>(block.values(0, r) - meta), static_cast<int32_t>(first + x - begin)};
    }
  }
  return to;
}

// Tiles [t0, t1) of R rows of dL/dz against a tap's panel, added to the sums of their pixels.
template <class V, int U, int R>
TWOFOUR_INLINE void add_reached(const Reached* reached, int64_t t0, int64_t t1, int64_t steps, const float* panel,
                                float* sums) {
  constexpr int64_t stride = panel_stride(U) * V::width;
  typename V::reg acc[R][U];
  TWOFOUR_UNROLL
  for (int r = 0; r < R; r++) {
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) acc[r][u] = V::zero();
  }
  const char* x = reinterpret_cast<const char*>(panel + t0 * kPanelTile * stride);
  for (int64_t t = t0; t < t1; t++) {
    uint64_t meta[R];
    RowsApart<R> values;
    TWOFOUR_UNROLL
    for (int r = 0; r < R; r++) {
      const char* at = reached[r].meta + t * reached[r].tile_bytes;
      std::memcpy(meta + r, at, 8);
      values.at[r] = reinterpret_cast<const float*>(at + reached[r].values);
    }
    for (int64_t s = least(kPanelTile / kStep, steps - t * (kPanelTile / kStep)); s > 0; s--) {
      add_step<V, U, R>(values, x, meta, acc);
      TWOFOUR_UNROLL
      for (int r = 0; r < R; r++) meta[r] >>= kStep, values.at[r] += kStep / 2;
      x += kStep * stride * 4;
    }
  }
  TWOFOUR_UNROLL
  for (int r = 0; r < R; r++) {
    float* to = sums + reached[r].pixel * stride;
    TWOFOUR_UNROLL
    for (int u = 0; u < U; u++) V::store_aligned(to + u * V::width, acc[r][u] + V::load_aligned(to + u * V::width));
  }
}

// All taps of a chunk whose panel uses `used` <= U vectors.
template <class V, int U>
TWOFOUR_NOINLINE void add_taps(int64_t used, const NmConvGradient& a, const TapPlan<V>& plan, const float* panels,
                               const TapMember<V>& member) {
  if constexpr (U > 1)
    if (used < U) return add_taps<V, U - 1>(used, a, plan, panels, member);
  constexpr int R = panel_rows<V>(panel_stride(U));
  const int64_t tile_bytes = kPanelTile * plan.stride() * 4, pass = most(kPassBytes / tile_bytes, 1);
  const int64_t steps = ceil_div(a.out_channels, kStep);
  for (int64_t t0 = 0; t0 < plan.tiles; t0 += pass) {
    const int64_t t1 = least(t0 + pass, plan.tiles);
    for (int64_t tap = 0; tap < plan.taps; tap++) {
      const float* panel = panels + tap * plan.tiles * kPanelTile * plan.stride();
      const Reached *at = member.reached + member.until[tap], *end = member.reached + member.until[tap + 1];
      for (; at + R <= end; at += R) add_reached<V, U, R>(at, t0, t1, steps, panel, member.sums);
      for (; at < end; at++) add_reached<V, U, 1>(at, t0, t1, steps, panel, member.sums);
    }
  }
}

// Pixels [begin, end), one chunk, of channels [first, first + count).
template <class V>
void sum_chunk(const NmConvGradient& a, const TapPlan<V>& plan, const TapMember<V>& member, const float* panels, int64_t begin,
               int64_t end, int64_t first, int64_t count) {
  Reached* to = member.reached;
  for (int64_t tap = 0; tap < plan.taps; tap++) {
    member.until[tap] = to - member.reached;
    to = reach(a, begin, end, tap / a.width.taps, tap % a.width.taps, to);
  }
  member.until[plan.taps] = to - member.reached;
  const int64_t stride = plan.stride();
  std::memset(member.sums, 0, static_cast<size_t>((end - begin) * stride) * 4);
  add_taps<V, TapPlan<V>::wide>(plan.vectors, a, plan, panels, member);
  for (int64_t pixel = begin; pixel < end; pixel++)
    std::memcpy(a.dx + pixel * a.in_channels + first, member.sums + (pixel - begin) * stride, static_cast<size_t>(count) * 4);
}

// The members share the packing of a run of channels, then the pixels.
template <class V>
void sum_taps(const NmConvGradient& a) {
  const TapPlan<V> plan(a);
  float* panels = static_cast<float*>(a.workspace);
  with_team(a.threads, [&](const Team& team) {
    const TapMember<V> member(a, plan, team.me);
    int64_t o0, o1, begin, end;
    team.share(plan.tiles * kPanelTile, 1, &o0, &o1);
    team.share(plan.pixels, 16, &begin, &end);
    for (int64_t first = 0; first < a.in_channels; first += plan.channels) {
      if (first > 0) team.barrier();  // the panels before are still being read
      pack_taps(a, plan, first, o0, o1, panels);
      team.barrier();
      const int64_t count = least(plan.channels, a.in_channels - first);
      for (int64_t pixel = begin; pixel < end; pixel += plan.chunk)
        sum_chunk(a, plan, member, panels, pixel, least(pixel + plan.chunk, end), first, count);
    }
  });
}

}  // namespace
