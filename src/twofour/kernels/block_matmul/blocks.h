// The layout "blocks": a weight of kept R x C blocks as kernels read it, drawn in README.md.
//
// Rows are cut into strips of 16, 8, 4, 2 or 1, the largest of these that divides R; 16 rows make a unit. A strip holds
// an index for each run of its inputs that are kept, and for each of these inputs, `per` at a time, a dword for every row:
// one float, two bfloat16 or four bytes of the row's weights. Behind the header of 64 bytes stand
//
//   BlockHead                          64 bytes
//   uint32 starts[strips + 1]          where each strip's indices begin, counted in indices
//   uint16 indices[head.indices]       of the inputs, or of `per` inputs where runs are of whole dwords
//                                      of bytes whose inputs stand apart instead (`windowed`):
//   uint8 counts[strips][windows]      how many inputs each strip keeps of each window of 128; windows filled up to 8 by zeros
//   uint8 indices[head.indices]        their places in the window, strip after strip
//   float scales[out + 16], int32 sums[out + 16]   of whole numbers alone: of each row, and of its weights
//   dwords of weights                  [step][row of the strip], strip after strip
//
// each part from a multiple of 64 bytes on. Strips are padded to whole vectors of 16 dwords by indices of the zeros that
// stand behind the inputs of a token (`zero`).
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/matmul.h"
#include "native/integers.h"

namespace twofour {

constexpr int64_t kBlockUnit = 16;       // rows of a unit, and dwords of a vector of weights
constexpr int64_t kLastIndex = 0xffff;   // what an index can say
constexpr int64_t kWindow = 128;         // inputs that a place of a byte is counted in: what two vectors of 64 bytes hold
constexpr int64_t kLargestSide = 1024;   // of a block, as patterns/block.py has it
constexpr int64_t kMostParts = 64;
constexpr int64_t kLargestLength = int64_t{1} << 40;  // of an axis: sizes do not overflow
constexpr int64_t kMostIndices = int64_t{1} << 48;

struct BlockHead {
  int32_t r, c, parts, unused;
  int64_t indices;
  char pattern[40];  // its text: what Python restores the canonical form by
};
static_assert(sizeof(BlockHead) == 64);

// What follows from the sizes of a weight and its blocks.
struct BlockShape {
  int64_t out, in, r, c, parts;
  int64_t per;       // weights of a dword: 1, 2 or 4
  int64_t strip;     // rows of a strip
  int64_t run;       // dwords of a run of inputs: 16, 4 or 1; 0: an index for each input, where `per` does not divide C
  int64_t part_out;  // rows of a part
  int64_t part_units, units, strips;
  int64_t zero;      // index of the zeros behind the inputs
  int64_t multiple;  // indices of a strip are a multiple of this, a power of two
  int64_t windows, counted;  // of the inputs, and counts of a strip: held, as finding them divides

  BlockShape(int64_t rows, int64_t columns, int64_t block_rows, int64_t block_columns, int64_t of, int64_t bytes)
      : out(rows), in(columns), r(block_rows), c(block_columns), parts(of), per(4 / bytes) {
    strip = kBlockUnit;
    while (r % strip != 0) strip /= 2;
    const int64_t vector = kBlockUnit / strip;  // steps of a vector
    run = c % per != 0 ? 0 : c / per % 16 == 0 ? 16 : c / per % 4 == 0 ? 4 : 1;
    part_out = out / parts;
    part_units = ceil_div(round_up(part_out, r), kBlockUnit);
    units = part_units * parts;
    strips = units * kBlockUnit / strip;
    zero = round_up(round_up(in, c), 16 * per) / (run == 0 ? 1 : per);
    multiple = run == 0 ? per * vector : run < vector ? vector / run : 1;
    windows = ceil_div(round_up(in, c), kWindow);  // the last block may reach over the end
    counted = round_up(windows, 8);
  }
  bool sound() const { return zero <= kLastIndex; }
  // Whether indices are places in windows: each index of a byte weight costs the bandwidth that one of its bytes does.
  bool windowed() const { return run == 0 && per == 4; }
  // Dwords, or inputs where an index is of one, that a token has with the zeros.
  int64_t places() const { return zero + (run > 16 ? run : 16); }
  // Bytes of a token as vectors are loaded from it: the last one begins at the last place, and windows are whole.
  int64_t token_bytes() const { return round_up(places() * (run == 0 ? 4 / per : 4), kWindow) + 128; }
  int64_t steps(int64_t indices) const { return run == 0 ? indices / per : indices * run; }

  // First row of the answer that a unit has, and how many.
  int64_t row(int64_t unit) const {
    return unit / part_units * part_out + unit % part_units * kBlockUnit;
  }
  int64_t rows(int64_t unit) const {
    const int64_t left = part_out - unit % part_units * kBlockUnit;
    return left < kBlockUnit ? left : kBlockUnit;
  }
};

// Where the parts of a layout stand, in bytes behind the header.
struct BlockPlaces {
  int64_t starts, counts, indices, scales, sums, weights, end;

  BlockPlaces(const BlockShape& shape, int64_t count) {
    starts = sizeof(BlockHead);
    counts = starts + round_up((shape.strips + 1) * 4, 64);
    indices = counts + (shape.windowed() ? round_up(shape.strips * shape.counted, 64) : 0);
    scales = indices + round_up(count * (shape.windowed() ? 1 : 2), 64);
    const int64_t head = shape.per == 4 ? round_up((shape.out + kBlockUnit) * 4, 64) : 0;
    sums = scales + head;
    weights = sums + head;
    end = weights + shape.steps(count) * shape.strip * 4;
  }
};

}  // namespace twofour

namespace {

using twofour::BlockHead;
using twofour::BlockPlaces;
using twofour::BlockShape;
using twofour::kBlockUnit;

// A layout as a kernel reads it; the border has held its size against its head.
struct Blocks {
  BlockShape shape;
  const BlockHead& head;
  const uint32_t* starts;
  const uint8_t* counts;      // where the layout is windowed, as `places`
  const uint8_t* places;
  const uint16_t* indices;    // where it is not
  const float* scales;
  const int32_t* sums_of_rows;
  const char* weights;

  Blocks(const void* data, int64_t out, int64_t in, int64_t bytes) : Blocks(*static_cast<const BlockHead*>(data), out, in, bytes) {}
  Blocks(const BlockHead& found, int64_t out, int64_t in, int64_t bytes)
      : shape(out, in, found.r, found.c, found.parts, bytes), head(found) {
    const BlockPlaces at(shape, head.indices);
    const char* base = reinterpret_cast<const char*>(&head);
    starts = reinterpret_cast<const uint32_t*>(base + at.starts);
    counts = reinterpret_cast<const uint8_t*>(base + at.counts);
    places = reinterpret_cast<const uint8_t*>(base + at.indices);
    indices = reinterpret_cast<const uint16_t*>(base + at.indices);
    scales = reinterpret_cast<const float*>(base + at.scales);
    sums_of_rows = reinterpret_cast<const int32_t*>(base + at.sums);
    weights = base + at.weights;
  }
  int64_t per_unit() const { return kBlockUnit / shape.strip; }

  // Calls D::finish of the sums of the rows of `units` units from `unit` on, all of one part.
  template <class D>
  void finish(const twofour::Matmul& a, const typename D::Sum* sums, const typename D::Token* kept, int64_t first,
              int64_t tokens, int64_t unit, int64_t units = 1) const {
    const int64_t row = shape.row(unit), last = unit + units - 1, vectors = units * (kBlockUnit / D::V::width);
    D::finish(a, {scales, sums_of_rows}, sums, vectors, kept, first, tokens, row, shape.row(last) + shape.rows(last));
  }

  // Whether the strips of units [begin, end) stay inside the layout, and their inputs inside a token.
  bool sound(int64_t begin, int64_t end) const {
    const int64_t first = begin * per_unit(), last = end * per_unit();
    const int64_t rest = shape.multiple - 1;  // of a power of two: a division per strip took a tenth of a small call
    for (int64_t s = first; s < last; s++)
      if (starts[s] > starts[s + 1] || (starts[s] & rest) != 0) return false;
    if (starts[last] > head.indices || (starts[last] & rest) != 0) return false;
    if (shape.windowed()) {
      for (int64_t s = first; s < last; s++)
        if (!sound_counts(s)) return false;
      return true;
    }
    uint16_t most = 0;
    for (int64_t i = starts[first]; i < starts[last]; i++) most = indices[i] > most ? indices[i] : most;
    return most <= shape.zero;
  }

  // Whether a strip has as many places as its windows count, but for those that fill a vector, and none in the windows
  // behind the last that fill its counts up to 8: kernels do not walk those.
  bool sound_counts(int64_t strip) const {
    constexpr uint64_t every = 0x0101010101010101, pairs = 0x00ff00ff00ff00ff;
    const int64_t counted = shape.counted;
    int64_t sum = 0;
    uint64_t above = 0;  // the highest bit of each byte of more than 128
    uint64_t eight = 0;
    for (int64_t w = 0; w < counted; w += 8) {
      std::memcpy(&eight, counts + strip * counted + w, 8);
      above |= ((eight & 0x7f * every) + 0x7f * every) & eight & 0x80 * every;
      sum += static_cast<int64_t>(((eight & pairs) + (eight >> 8 & pairs)) * (every & pairs) >> 48);
    }
    const int64_t last = shape.windows % 8;
    const uint64_t behind = last == 0 ? 0 : eight >> 8 * last;  // counts are little-endian, as all machines here are
    const int64_t filled = (sum + shape.multiple - 1) & -shape.multiple;  // a power of two: no division per strip
    return above == 0 && behind == 0 && filled == starts[strip + 1] - starts[strip];
  }
};

}  // namespace
