// How a convolution is cut: the output into tiles, the tiles into blocks whose transforms stay in the second-level cache.
#pragma once

#include <cstdint>

#include "kernels/dense_conv/dense_conv.h"
#include "native/integers.h"

namespace {

using twofour::DenseConv;
using twofour::kConvPanel;

constexpr int64_t kBlockBytes = 600 << 10;  // transformed input of a block

template <class V, class Points>
struct WinogradPlan {
  static constexpr int64_t places = Points::inputs * Points::inputs;
  // Rows of tiles that the inner product sums at once: two vectors each, of the registers that a set has.
  static constexpr int64_t rows = V::width == 16 ? 14 : 6;

  int64_t down, across, tiles;  // tiles of an image's height and width; of all images
  int64_t block, chunks;        // tiles of a block; vectors of input channels
  int64_t panels, part, parts;  // of output channels; tiles of a part of a block, which one thread multiplies at a time
  int64_t place, sums;          // floats from a place to the next: of the input of a block, of the sums of a part

  explicit WinogradPlan(const DenseConv& a)
      : down(ceil_div(a.height.output, Points::outputs)), across(ceil_div(a.width.output, Points::outputs)),
        tiles(a.images * down * across), chunks(ceil_div(a.in_channels, V::width)),
        panels(ceil_div(a.out_channels, kConvPanel)) {
    const int64_t each = places * chunks * V::width * 4, most = kBlockBytes / each > rows ? kBlockBytes / each : rows;
    const int64_t threads = a.threads > 1 ? a.threads : 1, shares = threads > 1 ? ceil_div(2 * threads, panels) : 1;
    block = even(tiles, threads * most);
    part = even(block, least(most, ceil_div(block, shares)));
    parts = ceil_div(block, part);
    place = (block * chunks + 1) * V::width;  // not a power of two: places would share a set of the cache
    sums = part * kConvPanel + 16;
  }
  static int64_t even(int64_t count, int64_t most) { return ceil_div(count, ceil_div(count, most)); }
  int64_t zero_floats() const { return round_up(chunks * V::width, 16); }
  int64_t input_floats() const { return round_up(places * place, 16); }
  int64_t sum_floats() const { return round_up(places * sums, 16); }
  int64_t bytes(int64_t threads) const {
    return 4 * (zero_floats() + input_floats() + (threads > 1 ? threads : 1) * sum_floats());
  }
};

}  // namespace
