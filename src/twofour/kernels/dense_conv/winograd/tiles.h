// The convolution: tiles of the image transformed, a product for each place, the sums transformed back and stored.
#pragma once

#include <cstdint>

#include "native/team.h"
#include "plan.h"
#include "product.h"

namespace {

template <class V, class Points>
struct Winograd {
  using reg = typename V::reg;
  using Plan = WinogradPlan<V, Points>;
  static constexpr int n = Points::inputs, m = Points::outputs;

  const DenseConv& a;
  const Plan plan;
  float *zeros, *packed, *sums;

  Winograd(const DenseConv& args, const Plan& cut) : a(args), plan(cut) {
    zeros = static_cast<float*>(args.workspace);
    packed = zeros + plan.zero_floats();
    sums = packed + plan.input_floats();
  }

  // A tile's image, and its first output pixel there.
  struct Place {
    int64_t image, row, column;
  };
  TWOFOUR_INLINE Place find(int64_t tile) const {
    const int64_t within = tile % (plan.down * plan.across);
    return {tile / (plan.down * plan.across), within / plan.across * m, within % plan.across * m};
  }

  // Tile `tile`, the t-th of its block, transformed: its places stand plan.place floats apart.
  void pack(int64_t tile, int64_t t) const {
    const Place at = find(tile);
    const float* pixels[n][n];
    for (int i = 0; i < n; i++)
      for (int j = 0; j < n; j++) {
        const int64_t row = at.row - a.height.padding + i, column = at.column - a.width.padding + j;
        const bool inside = static_cast<uint64_t>(row) < static_cast<uint64_t>(a.height.input) &&
                            static_cast<uint64_t>(column) < static_cast<uint64_t>(a.width.input);
        pixels[i][j] = inside ? a.x + ((at.image * a.height.input + row) * a.width.input + column) * a.in_channels : zeros;
      }
    for (int64_t chunk = 0; chunk < plan.chunks; chunk++) {
      const int64_t c = chunk * V::width;
      float* to = packed + (chunk * plan.block + t) * V::width;
      if (a.in_channels - c >= V::width) pack_chunk<true>(pixels, c, to);
      else pack_chunk<false>(pixels, c, to);
    }
  }
  template <bool whole>
  TWOFOUR_NOINLINE void pack_chunk(const float* const (&pixels)[n][n], int64_t c, float* to) const {
    reg half[n][n];
    for (int j = 0; j < n; j++) {
      reg d[n], t[n];
      TWOFOUR_UNROLL
      for (int i = 0; i < n; i++)
        d[i] = whole ? V::load_unaligned(pixels[i][j] + c) : V::load_partial(pixels[i][j] + c, a.in_channels - c);
      Points::input(d, t);
      TWOFOUR_UNROLL
      for (int i = 0; i < n; i++) half[i][j] = t[i];
    }
    for (int i = 0; i < n; i++, to += n * plan.place) {
      reg t[n];
      Points::input(half[i], t);
      TWOFOUR_UNROLL
      for (int j = 0; j < n; j++) V::store_aligned(to + j * plan.place, t[j]);
    }
  }

  // The sums of tile `tile` at `from` into its pixels of y: 32 output channels, or what is left of them.
  void unpack(int64_t tile, int64_t panel, const float* from) const {
    const Place at = find(tile);
    const int64_t high = least(m, a.height.output - at.row), wide = least(m, a.width.output - at.column);
    const int64_t first = ((at.image * a.height.output + at.row) * a.width.output + at.column) * a.out_channels;
    for (int64_t k = 0; k < kConvPanel; k += V::width) {
      const int64_t channel = panel * kConvPanel + k, count = a.out_channels - channel;
      if (count >= V::width) unpack_vector<true>(from + k, first + channel, high, wide, channel, V::width);
      else if (count > 0) unpack_vector<false>(from + k, first + channel, high, wide, channel, count);
    }
  }
  template <bool whole>
  TWOFOUR_NOINLINE void unpack_vector(const float* from, int64_t offset, int64_t high, int64_t wide, int64_t channel,
                                    int64_t count) const {
    reg half[m][n];
    for (int j = 0; j < n; j++) {
      reg s[n], y[m];
      TWOFOUR_UNROLL
      for (int i = 0; i < n; i++) s[i] = V::load_aligned(from + (i * n + j) * plan.sums);
      Points::output(s, y);
      TWOFOUR_UNROLL
      for (int i = 0; i < m; i++) half[i][j] = y[i];
    }
    const reg bias = a.bias == nullptr ? V::zero() : V::load_partial(a.bias + channel, count);
    const bool relu = a.activation.relu();
    const reg most = V::all(a.activation.most);
    for (int64_t i = 0; i < high; i++) {
      reg y[m];
      Points::output(half[i], y);
      const int64_t row = offset + i * a.width.output * a.out_channels;
      TWOFOUR_UNROLL
      for (int j = 0; j < m; j++) {
        if (j >= wide) break;
        const int64_t pixel = row + j * a.out_channels;
        reg v = y[j] + bias;
        if (a.other != nullptr) v = v + (whole ? V::load_unaligned(a.other + pixel) : V::load_partial(a.other + pixel, count));
        if (relu) v = V::min(most, V::max(V::zero(), v));  // a NaN stays one: the second operand wins
        if (whole) V::store_unaligned(a.y + pixel, v);
        else V::store_partial(a.y + pixel, v, count);
      }
    }
  }

  // Tiles [t0, t1) of a block by a panel of output channels.
  void multiply(int64_t t0, int64_t t1, int64_t panel, float* mine) const {
    const float* w = a.weight + panel * Plan::places * a.in_channels * kConvPanel;
    const int64_t groups = ceil_div(t1 - t0, Plan::rows), step = plan.block * V::width;
    for (int64_t place = 0; place < Plan::places; place++, w += a.in_channels * kConvPanel)
      for (int64_t group = 0; group < groups; group++) {
        const int64_t begin = (t1 - t0) * group / groups, end = (t1 - t0) * (group + 1) / groups;
        const float* x = packed + place * plan.place + (t0 + begin) * V::width;
        float* to = mine + place * plan.sums + begin * kConvPanel;
        // The first group reads the weights from memory, which is slower than it multiplies; the others leave memory
        // idle. So the first two fetch a half each of the next place's weights.
        const float* ahead = w + (groups > 1 && group < 2 ? (2 + group) * (kConvPanel / 2) * a.in_channels : 0);
        for (int64_t k = 0; k < kConvPanel; k += 2 * V::width)
          multiply_some<V, Plan::rows>(end - begin, x, step, a.in_channels, w + k, to + k, ahead);
      }
  }

  void run(const Team& team) const {
    if (team.me == 0)
      for (int64_t c = 0; c < plan.zero_floats(); c++) zeros[c] = 0;
    team.barrier();
    float* mine = sums + team.me * plan.sum_floats();
    for (int64_t first = 0; first < plan.tiles; first += plan.block) {
      const int64_t count = least(plan.block, plan.tiles - first);
      int64_t begin, end;
      team.share(count, 1, &begin, &end);
      for (int64_t t = begin; t < end; t++) pack(first + t, t);
      team.barrier();
      team.share(plan.panels * plan.parts, 1, &begin, &end);
      for (int64_t item = begin; item < end; item++) {
        const int64_t panel = item / plan.parts, t0 = item % plan.parts * plan.part, t1 = least(t0 + plan.part, count);
        if (t0 >= t1) continue;
        multiply(t0, t1, panel, mine);
        for (int64_t t = t0; t < t1; t++) unpack(first + t, panel, mine + (t - t0) * kConvPanel);
      }
      team.barrier();  // the transformed input is still being read
    }
  }
};

template <class V, class Points>
int64_t winograd_workspace(const DenseConv& a) {
  return WinogradPlan<V, Points>(a).bytes(a.threads);
}

template <class V, class Points>
void winograd(const DenseConv& a) {
  const WinogradPlan<V, Points> plan(a);
  const Winograd<V, Points> conv(a, plan);
  with_team(a.threads, [&](const Team& team) { conv.run(team); });
}

}  // namespace
