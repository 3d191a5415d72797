// Design: a vector holds one pixel of each of 16 (8, 4) blocks of the output; a kept weight is one broadcast, one address.
//
// The input is transposed once into Q[row][channel][column], one vector per place of the blocks with their halo, and
// every tap reads it in place (README.md).
#pragma once

#include <cstdint>

#include "conv_pairs.h"
#include "conv_plan.h"
#include "kernels/epilogue_math.h"
#include "native/team.h"

namespace {

constexpr int64_t kFloatsAhead = 32;            // channels that the input is fetched ahead
constexpr int64_t kNowhere = int64_t{1} << 40;  // a row that no image has

// The first pixel of every lane's block in a tensor of rows x columns pixels, and from there any other.
template <class V>
struct LaneMap {
  int64_t rows, columns, channels;
  int64_t row[V::width], column[V::width], at[V::width];

  // Blocks `down` x `right` pixels apart; lanes of images that do not exist have no pixels.
  template <class Plan>
  LaneMap(const Plan& plan, int64_t first_image, int64_t images, const int64_t (&size)[3], int64_t down, int64_t right)
      : rows(size[0]), columns(size[1]), channels(size[2]) {
    for (int lane = 0; lane < V::width; lane++) {
      const int64_t n = lane / (plan.lanes_h * plan.lanes_w), within = lane % (plan.lanes_h * plan.lanes_w);
      column[lane] = within % plan.lanes_w * right;
      row[lane] = within / plan.lanes_w * down;
      at[lane] = (((first_image + n) * rows + row[lane]) * columns + column[lane]) * channels;
      if (first_image + n >= images) row[lane] = kNowhere;
    }
  }
  // The pixel i rows and j columns from each lane's first one, `none` where there is none.
  template <class Value>
  TWOFOUR_INLINE void find(Value* base, int64_t i, int64_t j, Value* none, Value** pixels) const {
    const int64_t step = (i * columns + j) * channels;
    for (int lane = 0; lane < V::width; lane++) {
      const bool exists = static_cast<uint64_t>(row[lane] + i) < static_cast<uint64_t>(rows) &&
                          static_cast<uint64_t>(column[lane] + j) < static_cast<uint64_t>(columns);
      pixels[lane] = exists ? base + (at[lane] + step) : none;
    }
  }
};

template <class V, int Wide>
struct ConvBlocks {
  const NmConv& a;
  const ConvPlan<V, Wide> plan;
  const PackedAxis height, width;
  float *zeros, *packed, *sums;
  int64_t* table;

  ConvBlocks(const NmConv& args, const ConvPlan<V, Wide>& cut)
      : a(args), plan(cut), height(args.height, cut.strip), width(args.width, cut.block_w) {
    char* at = static_cast<char*>(args.workspace);
    const auto take = [&](int64_t count) {
      char* from = at;
      at += ceil_div(count, 16) * 64;
      return from;
    };
    zeros = reinterpret_cast<float*>(take(plan.zero_floats));
    table = reinterpret_cast<int64_t*>(take(2 * plan.table_ints));
    packed = reinterpret_cast<float*>(take(plan.packed_floats));
    sums = reinterpret_cast<float*>(at);
  }

  // The blocks that one pass works on, and the first row of positions in them.
  struct Strip {
    int64_t group, row, rows;
    const LaneMap<V>&input, &output;
  };

  // Bytes from a panel's first position to each input, in the order of README.md, then to those that stand twice.
  void fill_table() const {
    for (int64_t i = 0; i < plan.zero_floats; i++) zeros[i] = 0;
    int64_t* to = table;
    for (int64_t kh = 0; kh < a.height.taps; kh++)
      for (int64_t c0 = 0; c0 < plan.channels; c0 += kConvBlock)
        for (int64_t kw = 0; kw < a.width.taps; kw++)
          for (int64_t c = c0; c < least(c0 + kConvBlock, plan.channels); c++)
            *to++ = ((height.tap[kh] * plan.channels + c) * plan.line + width.tap[kw]) * V::width * 4;
    for (int64_t g = 0; g < a.twice_count; g++)
      for (int64_t i = 0; i < 4; i++) *to++ = table[4 * a.twice[g] + i];
    for (; to < table + plan.table_ints; to++) *to = 0;
  }

  void pack_position(const Strip& strip, int64_t row, int64_t column) const {
    const float* pixels[V::width];
    const float *from = a.x + strip.group * plan.channels, *none = zeros;
    if (plan.flat)
      strip.input.find(from, 0, plan.flat_pixel(strip.row + row, column), none, pixels);
    else
      strip.input.find(from, height.pixel(row) + strip.row * a.height.stride - a.height.padding,
                       width.pixel(column) - a.width.padding, none, pixels);
    float* to = packed + (row * plan.channels * plan.line + column) * V::width;
    const int64_t whole = plan.channels / V::width * V::width;
    for (int64_t c = 0; c < whole; c += V::width) pack_square<true>(pixels, c, V::width, to);
    if (whole < plan.channels) pack_square<false>(pixels, whole, plan.channels - whole, to);
  }
  template <bool whole>
  TWOFOUR_INLINE void pack_square(const float* const* pixels, int64_t c, int64_t count, float* to) const {
    typename V::reg t[V::width];
    const int64_t more = c + kFloatsAhead, ahead = more < plan.channels ? more : more - plan.channels + plan.jump;
    TWOFOUR_UNROLL
    for (int i = 0; i < V::width; i++) {
      __builtin_prefetch(pixels[i] + ahead);
      t[i] = whole ? V::load_unaligned(pixels[i] + c) : V::load_partial(pixels[i] + c, count);
    }
    V::transpose(t);
    TWOFOUR_UNROLL
    for (int i = 0; i < V::width; i++)
      if (whole || i < count) V::store_aligned(to + (c + i) * plan.line * V::width, t[i]);
  }

  // Where vector `column` of row `row` goes.
  TWOFOUR_INLINE void find_output(const Strip& strip, int64_t row, int64_t column, float** pixels) const {
    float *to = a.y + strip.group * plan.rows, *none = nullptr;
    if (plan.flat) strip.output.find(to, 0, plan.flat_pixel(strip.row + row, column), none, pixels);
    else strip.output.find(to, strip.row + row, column, none, pixels);
  }

  // Rows [m0, m1) of a panel's sums into y at `pixels`.
  void unpack(const Strip& strip, float* const* pixels, int64_t used, int64_t m0, int64_t m1, const float* from) const {
    for (int64_t u = 0; u < used; u++, pixels += V::width) {
      const int64_t offset = strip.group * plan.rows, whole = m0 + (m1 - m0) / V::width * V::width;
      for (int64_t m = m0; m < whole; m += V::width)
        unpack_square<true>(pixels, from + ((m - m0) * used + u) * V::width, used, offset, m, V::width);
      if (whole < m1)
        unpack_square<false>(pixels, from + ((whole - m0) * used + u) * V::width, used, offset, whole, m1 - whole);
      if (!a.activation.passes()) continue;
      for (int i = 0; i < V::width; i++)
        if (pixels[i]) finish_rows<V>({a.activation.kind, Combine::none, nullptr, 0}, pixels[i] + m0, 0, 0, 1, 0, m1 - m0);
    }
  }
  template <bool whole>
  TWOFOUR_INLINE void unpack_square(float* const* pixels, const float* from, int64_t used, int64_t offset, int64_t m,
                                    int64_t count) const {
    typename V::reg t[V::width];
    TWOFOUR_UNROLL
    for (int i = 0; i < V::width; i++) t[i] = whole || i < count ? V::load_aligned(from + i * used * V::width) : V::zero();
    V::transpose(t);
    const typename V::reg bias =
        a.bias == nullptr ? V::zero() : V::load_partial(a.bias + offset + m, count);
    TWOFOUR_UNROLL
    for (int i = 0; i < V::width; i++) {
      if (pixels[i] == nullptr) continue;
      float* to = pixels[i] + m;
      typename V::reg v = t[i] + bias;
      if (a.other != nullptr) v = v + V::load_partial(a.other + (to - a.y), count);
      if (a.activation.relu()) v = FloatMath<V>::at_most(a.activation.most, FloatMath<V>::relu(v));
      if (whole) V::store_unaligned(to, v);
      else V::store_partial(to, v, count);
    }
  }

  // One panel through all tiles for rows [m0, m1), a multiple of the layout's domains.
  void multiply(const Strip& strip, int64_t row, int64_t column, int64_t used, int64_t m0, int64_t m1,
                float* mine) const {
    const int64_t shift = (row * plan.channels * plan.line + column) * V::width;
    const char* base = reinterpret_cast<const char*>(packed + shift);
    const char* group = a.weight + strip.group * a.weight_bytes;
    int64_t last[kPanelTile];
    const int64_t end = (plan.tiles - 1) * kPanelTile;
    const float* none = zeros + ceil_div(plan.channels, 16) * 16;  // what weights behind the last input multiply
    for (int64_t i = 0; i < kPanelTile; i++)
      last[i] = end + i < plan.inputs ? table[end + i] : reinterpret_cast<const char*>(none) - base;
    float* pixels[Wide * V::width];
    for (int64_t u = 0; u < used; u++) find_output(strip, row, column + u, pixels + u * V::width);
    const PanelFill fill{used, plan.flat ? plan.pixels - plan.flat_pixel(strip.row + row, column + used - 1) : V::width};
    for (int64_t t = 0; t < plan.tiles; t++) {
      const int padding = padding_of(least(kPanelTile, plan.inputs - t * kPanelTile));
      for (int64_t m = m0; m < m1; m += kPairRows) {
        const char* weight = group + (m / kPairRows * plan.tiles + t) * kPairTileBytes;
        const int64_t end_row = least(m + kPairRows, m1), pairs = ceil_div(end_row - m, 2);
        float* to = mine + (m - m0) * used * V::width;
        const bool last_tile = t + 1 == plan.tiles;
        Lines lines{pixels, used * V::width, m, end_row - m, a.y, a.other};
        Lines* const fetched = last_tile ? &lines : nullptr;
        if (t < plan.even_tiles)
          add_some<V, EvenInputs, Wide>(fill, weight, pairs, padding,
                                        {base + table[t * kPanelTile], plan.line * V::width * 4}, t == 0, to, fetched,
                                        a.damaged);
        else
          add_some<V, AnyInputs, Wide>(fill, weight, pairs, padding,
                                       {base, last_tile ? last : table + t * kPanelTile}, t == 0, to, fetched,
                                       a.damaged);
        if (last_tile) unpack(strip, pixels, used, m, end_row, to);
      }
    }
  }

  void run_strip(const Strip& strip, const Team& team) const {
    int64_t begin, end;
    team.share(height.positions * width.positions, 1, &begin, &end);
    for (int64_t p = begin; p < end; p++) pack_position(strip, p / width.positions, p % width.positions);
    team.barrier();
    const int64_t chunks = ceil_div(plan.rows, plan.chunk);
    team.share(strip.rows * plan.panels * chunks, 1, &begin, &end);
    float* mine = sums + team.me * ceil_div(plan.sums_floats, 16) * 16;
    for (int64_t item = begin; item < end; item++) {
      const int64_t m = item % chunks * plan.chunk, panel = item / chunks % plan.panels * plan.vectors;
      const int64_t row = item / chunks / plan.panels;
      const int64_t left = plan.flat ? plan.flat - (strip.row + row) * plan.block_w : plan.block_w;
      multiply(strip, row, panel, least(plan.vectors, left - panel), m, least(m + plan.chunk, plan.rows), mine);
    }
    team.barrier();  // the packed input is still being read
  }

  void run_flat(const Team& team) const {
    const LaneMap<V> input(plan, 0, 1, {1, plan.pixels, a.in_channels}, 0, 1);
    const LaneMap<V> output(plan, 0, 1, {1, plan.pixels, a.out_channels}, 0, 1);
    for (int64_t group = 0; group < a.groups; group++)
      for (int64_t row = 0; row < plan.block_h; row += plan.strip)
        run_strip({group, row, least(plan.strip, plan.block_h - row), input, output}, team);
  }

  void run(const Team& team) const {
    if (team.me == 0) fill_table();
    team.barrier();
    if (plan.flat) return run_flat(team);
    for (int64_t group = 0; group < a.groups; group++)
      for (int64_t image = 0; image < a.images; image += plan.lanes_n) {
        const LaneMap<V> input(plan, image, a.images, {a.height.input, a.width.input, a.in_channels},
                               plan.block_h * a.height.stride, plan.block_w * a.width.stride);
        const LaneMap<V> output(plan, image, a.images, {a.height.output, a.width.output, a.out_channels}, plan.block_h,
                                plan.block_w);
        for (int64_t row = 0; row < plan.block_h; row += plan.strip)
          run_strip({group, row, least(plan.strip, plan.block_h - row), input, output}, team);
      }
  }
};

template <class V, int Wide>
int64_t conv_blocks_workspace(const NmConv& a) {
  return ConvPlan<V, Wide>(a).bytes(a.threads);
}

template <class V, int Wide>
void conv_blocks(const NmConv& a) {
  const ConvPlan<V, Wide> plan(a);
  const ConvBlocks<V, Wide> blocks(a, plan);
  with_team(a.threads, [&](const Team& team) { blocks.run(team); });
}

}  // namespace
