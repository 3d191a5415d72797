// How a convolution is cut: the output into blocks, one per vector lane, and the blocks into strips and panels.
//
// The lanes of a vector hold pixels of different blocks at the same place in each, so a step of one pixel inside the
// blocks is a step of one whole vector in memory: every tap reads aligned vectors of the same packed input.
#pragma once

#include <cstdint>

#include "kernels/layouts/pairs.h"
#include "kernels/packed_axis.h"
#include "native/compiler.h"
#include "native/integers.h"
#include "nm_conv.h"

namespace {

using twofour::kConvBlock;
using twofour::kPairRows;
using twofour::NmConv;

constexpr int64_t kStripBytes = 320 << 10;  // packed input of a strip, which stays in L2 with sums and weights that pass by

template <class V, int Wide>
struct ConvPlan {
  int64_t lanes_n, lanes_h, lanes_w;  // a power of two each, V::width lanes in all
  int64_t block_h, block_w;           // output positions of a block
  int64_t strip, vectors, panels;     // rows of positions in a strip; most vectors in a panel; panels in such a row
  int64_t channels, rows;             // of one group of channels
  int64_t inputs, tiles, even_tiles;  // of an output, those that stand twice among them; by 64; tiles of one tap each
  int64_t line;                       // vectors from a channel to the next: odd, so that they spread over cache sets
  int64_t flat;                       // 1x1: vectors of 16 neighbours over all pixels where those are fewer, or 0
  int64_t pixels;                     // of all images' answers
  int64_t jump;                       // floats from a pixel to the one that is packed next
  int64_t packed_floats, sums_floats, zero_floats, table_ints, chunk;

  explicit ConvPlan(const NmConv& a) {
    channels = a.in_channels / a.groups;
    rows = a.out_channels / a.groups;
    inputs = channels * a.height.taps * a.width.taps + 4 * a.twice_count;
    tiles = ceil_div(inputs, 64);
    even_tiles = channels % kConvBlock == 0 ? (inputs - 4 * a.twice_count) / 64 : 0;
    double best = 0;
    for (int64_t n = 1; n <= V::width; n *= 2)
      for (int64_t h = 1; n * h <= V::width; h *= 2) {
        const double found = cost(a, n, h, V::width / n / h);
        if (best != 0 && found >= best) continue;
        best = found;
        lanes_n = n, lanes_h = h, lanes_w = V::width / n / h;
      }
    block_h = ceil_div(a.height.output, lanes_h);
    block_w = ceil_div(a.width.output, lanes_w);
    flat = 0;
    pixels = a.images * a.height.output * a.width.output;
    if (pointwise(a.height) && pointwise(a.width)) {
      const int64_t count = ceil_div(pixels, V::width);
      if (count < ceil_div(a.images, lanes_n) * block_h * block_w) flat = count;
    }
    if (flat) {
      lanes_n = lanes_h = 1, lanes_w = V::width;
      block_h = ceil_div(flat, Wide), block_w = ceil_div(flat, block_h);
    }
    jump = a.in_channels * (flat ? V::width : a.width.stride);
    panels = ceil_div(block_w, Wide);
    vectors = ceil_div(block_w, panels);
    line = PackedAxis(a.width, block_w).positions | 1;
    strip = block_h;
    while (strip > 1 && strip_floats(a, strip) * 4 > kStripBytes) strip--;
    strip = ceil_div(block_h, ceil_div(block_h, strip));
    packed_floats = strip_floats(a, strip);
    zero_floats = ceil_div(channels, 16) * 16 + Wide * V::width;
    table_ints = tiles * 64;
    chunk = a.threads > 1 && strip * panels < 4 * a.threads ? kPairRows : 2 * kPairRows;
    sums_floats = (least(chunk, rows) + 1) * vectors * V::width;  // pairs may add a row of zeros
  }
  int64_t strip_floats(const NmConv& a, int64_t count) const {
    return PackedAxis(a.height, count).positions * channels * line * V::width;
  }
  // The pixels of an image are its rows one after the other: one tap, and no position without a pixel.
  static bool pointwise(const ConvAxis& axis) {
    return axis.taps == 1 && axis.stride == 1 && axis.padding == 0 && axis.input == axis.output;
  }
  int64_t flat_pixel(int64_t row, int64_t column) const { return (row * block_w + column) * V::width; }
  int64_t bytes(int64_t threads) const {
    const auto round = [](int64_t n) { return ceil_div(n, 16) * 64; };
    const int64_t shared = round(zero_floats) + round(2 * table_ints) + round(packed_floats);
    return shared + (threads > 1 ? threads : 1) * round(sums_floats);
  }
  // Slots of the two multiply-add ports: 64 a vector and tile of a pair of rows, half a slot for each of its 44 loads
  // and of 64 weights; and about 6 cycles to pack a vector of one input channel.
  double cost(const NmConv& a, int64_t n, int64_t h, int64_t w) const {
    const int64_t groups = ceil_div(a.images, n), high = ceil_div(a.height.output, h), wide = ceil_div(a.width.output, w);
    const double products = static_cast<double>(tiles * ceil_div(rows, 2)) * (86 * wide + 32 * ceil_div(wide, Wide)) / 2;
    const double pack = 6.0 * static_cast<double>(PackedAxis(a.height, high).positions * channels *
                                                  PackedAxis(a.width, wide).positions);
    return static_cast<double>(groups) * (static_cast<double>(high) * products + pack);
  }
};

}  // namespace
