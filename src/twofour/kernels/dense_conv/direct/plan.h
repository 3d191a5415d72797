// How a convolution is cut: outputs into panels of 32, the pixels of an image into blocks, windows into runs of memory.
#pragma once

#include <cstdint>

#include "kernels/dense_conv/dense_conv.h"
#include "native/compiler.h"
#include "native/integers.h"

namespace {

using twofour::ConvAxis;
using twofour::DenseConv;
using twofour::kConvPanel;

constexpr int64_t kDirectChunk = 512 << 10;   // bytes that the blocks of a chunk read, in an L2 of 1 MB
constexpr int64_t kDirectWeight = 256 << 10;  // a weight that stays in L2 itself
constexpr int64_t kDirectTable = 1 << 20;     // bytes of the tables of a chunk, where more than one block would fit
constexpr int64_t kWay = 4096;                // bytes from which on addresses share a set of a first-level cache
constexpr int kDirectRegions = 5;

// The taps of some outputs of an axis are all inside the image: [first, last).
struct Inside {
  int64_t first, last;
  explicit Inside(const ConvAxis& a) {
    const int64_t end = a.input + a.padding - a.dilation * (a.taps - 1);  // where a window cannot start any more
    first = least(ceil_div(a.padding, a.stride), a.output);
    last = end <= 0 ? first : least(ceil_div(end, a.stride), a.output);
    if (last < first) last = first;
  }
};

// A rectangle of an image's outputs, the same taps of which are outside the image; in blocks of one size or one less.
struct Region {
  int64_t row, column, rows, columns, block, blocks;  // block: its first
  bool down, inside;                                  // pixels one below the other follow each other; all taps are inside
  int64_t size, larger;                               // pixels of a block; blocks that have one more
  int64_t first(int64_t i) const { return i * size + least(i, larger); }
};

// Memory that is fetched while a block is multiplied: a line for each input, `step` bytes further each time.
struct Stream {
  const char* at;
  int64_t step;
  TWOFOUR_INLINE void fetch() {
    __builtin_prefetch(at, 0, 2);
    at += step;
  }
};

// Memory that is fetched while its first reader is two panels or more away, a part with every panel.
struct Fetched {
  int64_t step, bytes;  // bytes for each input, for each panel
  Fetched(int64_t all, int64_t panels, int64_t inputs) : step(ceil_div(all, panels * inputs)), bytes(step * inputs) {}
  Stream part(const float* from, int64_t panel) const {
    return {reinterpret_cast<const char*>(from) + panel * bytes, step};
  }
};

template <class V>
struct DirectPlan {
  static constexpr int vectors = 2, wide = vectors * V::width;
  static constexpr int most = V::width == 16 ? 13 : V::width == 8 ? 6 : 4;  // pixels of a block: registers for their sums
  struct Run {  // of all pixels of a block
    static constexpr bool table = true;
    const float* from[most];
    int64_t weight;  // floats behind the panel's first
    TWOFOUR_INLINE const float* input(int t, int64_t k) const { return from[t] + k; }  // k-th of pixel t
  };
  struct Block {
    static constexpr int most = DirectPlan::most;
    int64_t pixels, runs;
    int64_t at[most];  // pixels of the answer
    Run run[1];        // and on
    int64_t pixel(int64_t t) const { return at[t]; }
    TWOFOUR_INLINE const Run& window(int64_t i) const { return run[i]; }
  };

  int64_t channels, outputs, panels;  // of a group
  bool small;                         // the weight stays in L2: a block is multiplied with all panels before the next
  bool crowded;                       // neighbours share a set of the first-level cache: the image is copied, its pixels apart
  int64_t runs, length;               // of a window: a run for each tap; floats of one
  int64_t pitch;                      // floats from a pixel of the image to the next
  Region regions[kDirectRegions];
  int count = 0;
  int64_t blocks = 0, chunk;  // of an image; that are done together
  Fetched read, written;      // of the next block, where the weight stays in L2: its pixels, its answer

  explicit DirectPlan(const DenseConv& a)
      : channels(a.in_channels / a.groups), outputs(a.out_channels / a.groups), panels(ceil_div(outputs, kConvPanel)),
        small(outputs * a.height.taps * a.width.taps * channels * 4 <= kDirectWeight),
        crowded(a.in_channels * a.width.stride * 4 % kWay == 0 && a.width.output > 1),
        runs(a.height.taps * a.width.taps), length(channels),
        pitch(a.in_channels + (crowded ? 16 : 0)), read(most * a.width.stride * pitch * 4, panels, runs * length),
        written(most * a.out_channels * 4, panels, runs * length) {
    const Inside h(a.height), w(a.width);
    const int64_t high = a.height.output, wide = a.width.output;
    add({h.first, w.first, h.last - h.first, w.last - w.first, 0, 0, false, true, 0, 0});
    add({0, w.first, h.first, w.last - w.first, 0, 0, false, false, 0, 0});
    add({h.last, w.first, high - h.last, w.last - w.first, 0, 0, false, false, 0, 0});
    add({0, 0, high, w.first, 0, 0, true, false, 0, 0});
    add({0, w.last, high, wide - w.last, 0, 0, true, false, 0, 0});
    const int64_t each = (channels * a.height.stride * a.width.stride + (small ? outputs : 0)) * most * 4;
    const int64_t read = ceil_div(blocks * each, kDirectChunk), kept = ceil_div(blocks * block_bytes(), kDirectTable);
    chunk = ceil_div(blocks, least(blocks, read > kept ? read : kept));  // chunks of one size
  }
  void add(Region region) {
    if (region.rows * region.columns == 0) return;
    const int64_t pixels = region.rows * region.columns;
    region.block = blocks, region.blocks = ceil_div(pixels, most);
    region.size = pixels / region.blocks, region.larger = pixels % region.blocks;
    blocks += region.blocks;
    regions[count++] = region;
  }
  const Region& region_of(int64_t block) const {
    int i = 0;
    while (i + 1 < count && block >= regions[i + 1].block) i++;
    return regions[i];
  }
  int64_t block_bytes() const { return round_up(int64_t{sizeof(Block)} + runs * int64_t{sizeof(Run)}, 64); }
  int64_t zero_bytes() const { return round_up(length * 4, 64); }
  int64_t image_bytes(const DenseConv& a) const { return crowded ? a.height.input * a.width.input * pitch * 4 : 0; }
  int64_t bytes(const DenseConv& a) const { return zero_bytes() + round_up(image_bytes(a), 64) + chunk * block_bytes(); }
};

// A 1x1 convolution of stride 1: its images are one row of pixels.
template <class V>
inline DenseConv flattened(DenseConv a) {
  const auto plain = [](const ConvAxis& axis) {
    return axis.taps == 1 && axis.stride == 1 && axis.padding == 0 && axis.input == axis.output;
  };
  if (!plain(a.height) || !plain(a.width)) return a;
  const int64_t pixels = a.height.input * a.width.input;
  if (a.in_channels * 4 % kWay == 0 && pixels >= DirectPlan<V>::most) return a;  // copied, image by image
  const int64_t all = a.images * pixels;
  a.height = {1, 1, 1, 1, 0, 1}, a.width = {all, all, 1, 1, 0, 1};
  a.images = 1;
  return a;
}

}  // namespace
