// Where a convolution of codes reads and writes: an image with its zeros, the windows of output pixels, and which taps of a
// window lie outside the image.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "../tokens.h"
#include "bits_conv.h"

namespace {

using twofour::BitsConv;
using twofour::ConvAxis;
using twofour::PixelCodes;

constexpr int64_t kChunkPixels = 96;  // outputs that a panel of a weight is multiplied with before the next one
constexpr int kMostTokens = 8;        // of a tile
constexpr int64_t kGatherPiece = 16;  // bytes that are copied at once where windows are gathered
constexpr int64_t kTogether = 24;     // outputs whose sums become answers together: whole tiles

// Inputs of a tile that stand in windows: number `q` of token `t`.
template <class N>
struct Windows {
  const N* tokens[kMostTokens];
  const int32_t* places;
  int64_t more;
  TWOFOUR_INLINE const N* at(int t, int64_t q) const { return tokens[t] + (places[q] + more); }
  TWOFOUR_INLINE Windows from(int64_t n) const {
    Windows next = *this;
    next.more += n;
    return next;
  }
};

// The pixels first, first + step, ... of an axis of the image, which are all that a convolution reads. Windows of one tap
// leave out what lies between them: over what is read such a convolution goes pixel by pixel.
struct ReadAxis {
  ConvAxis axis;  // over what is read
  int64_t first = 0, step = 1, input;  // the last: pixels of the image

  explicit ReadAxis(const ConvAxis& a) : axis(a), input(a.input) {
    if (a.taps != 1 || a.stride == 1) return;
    const int64_t begin = least(a.output, ceil_div(a.padding, a.stride)), behind = a.input - 1 + a.padding;
    const int64_t end = behind < 0 ? 0 : least(a.output, behind / a.stride + 1);
    axis = {end > begin ? end - begin : 0, a.output, 1, 1, begin, 1};
    first = begin * a.stride - a.padding, step = a.stride;
  }
  int64_t at(int64_t i) const { return first + i * step; }
};

// A convolution over what it reads of an image.
struct ReadConv {
  ReadAxis rows, columns;
  BitsConv conv;
  explicit ReadConv(const BitsConv& a) : rows(a.height), columns(a.width), conv(a) {
    conv.height = rows.axis, conv.width = columns.axis;
  }
  int64_t pixels() const { return rows.input * columns.input; }  // of an image
};

// Pixels of an axis that some window reads, the zeros before and behind among them.
inline int64_t padded_axis(const ConvAxis& a) { return (a.output - 1) * a.stride + (a.taps - 1) * a.dilation + 1; }

// The taps [begin, end) of output `i` that lie inside the image.
inline void taps_inside(const ConvAxis& a, int64_t i, int64_t* begin, int64_t* end) {
  const int64_t first = i * a.stride - a.padding;
  *begin = first >= 0 ? 0 : least(a.taps, ceil_div(-first, a.dilation));
  *end = first >= a.input ? 0 : least(a.taps, (a.input - 1 - first) / a.dilation + 1);
  if (*end < *begin) *end = *begin;
}

// Outputs of an axis that have the same taps inside are one class; neighbours have the same number.
inline int64_t count_classes(const ConvAxis& a, int32_t* of = nullptr) {
  int64_t count = 0, begin = -1, end = -1;
  for (int64_t i = 0; i < a.output; i++) {
    int64_t b, e;
    taps_inside(a, i, &b, &e);
    count += i == 0 || b != begin || e != end;
    begin = b, end = e;
    if (of != nullptr) of[i] = static_cast<int32_t>(count - 1);
  }
  return count;
}

// The sums of values over the taps inside, of each class of rows and columns: [rows' class][columns' class][padded outputs].
inline void class_sums(const BitsConv& a, int64_t padded, int32_t* to) {
  int64_t rows = -1, top = -1, bottom = -1;
  for (int64_t i = 0; i < a.height.output; i++) {
    int64_t b, e;
    taps_inside(a.height, i, &b, &e);
    if (i > 0 && b == top && e == bottom) continue;
    top = b, bottom = e, rows++;
    int64_t left = -1, right = -1;
    for (int64_t j = 0; j < a.width.output; j++) {
      int64_t l, r;
      taps_inside(a.width, j, &l, &r);
      if (j > 0 && l == left && r == right) continue;
      left = l, right = r;
      std::memset(to, 0, static_cast<size_t>(padded) * 4);
      for (int64_t y = top; y < bottom; y++)
        for (int64_t x = left; x < right; x++)
          for (int64_t o = 0; o < padded; o++) to[o] += a.tap_sums[(y * a.width.taps + x) * padded + o];
      to += padded;
    }
  }
}

// What holds for the image at hand: its range, and whether pixels are lost: NaN, which one range for all images rounds to a
// code, or codes computed from NaN.
struct ImageFacts {
  Range range;
  uint8_t lost;
};

// One output pixel: the pixel of the padded image that its window begins with, the sum of the window's codes, sums of values over its taps inside the image,
// and the scale of the input, NaN where the window is lost.
struct OutputPixel {
  int64_t window;
  const int32_t* inside;
  int32_t sum;
  float scale;
};

// Bytes of the codes of a row of real pixels, behind which one pixel's codes stand with zeros behind them.
inline int64_t row_bytes(const BitsConv& a) { return round_up(a.width.input * a.in_channels, 64); }

// Everything that follows from the sizes of a call, in bytes of the workspace where it says where something stands.
struct ConvPlan {
  PixelCodes in;
  int64_t padded;              // outputs in whole panels
  int64_t high, wide, pixel;   // the padded image and the bytes of its pixels: those of `in`, but none is filled up where windows are gathered
  int64_t rows, chunks;        // rows of outputs that are computed together
  int64_t taps, step;          // numbers of a window: taps times `step`, or of one that is gathered fewer
  int64_t numbers;
  bool summed, bordered;       // whether sums of codes are needed, and taps outside the image count
  bool direct;                 // whether codes of an answer stand where the next layer reads them as they are made
  int64_t row_classes, column_classes;
  int64_t lost, image, sums, places, classes, class_of, reals, members, member;  // where they stand, and the bytes of a member
  int64_t codes, staged, pixels, scratch;  // of a member: codes of an output pixel and an input row, where its OutputPixels and more stand

  // `design`: what its tiles are (PlaneTiles, ByteTiles, LookupTiles).
  template <class K>
  ConvPlan(const BitsConv& a, const K& design)
      : in{K::planes, a.in_channels, bits_of(a.quantization.x_most)}, padded(round_up(a.out_channels, K::panel)),
        high(padded_axis(a.height)), wide(padded_axis(a.width)), pixel(K::gathered(a) ? in.channels : in.bytes()),
        taps(a.height.taps * a.width.taps), step(design.step(in)),
        numbers(K::gathered(a) ? ceil_div(taps * in.channels, 4) : taps * step), summed(design.head.beta != 0 && design.head.alpha != 0),
        bordered(a.quantization.dynamic || a.quantization.x_zero != 0),
        direct(a.answer.numbers != nullptr && a.answer.pool == 1 && !a.answer.to.planes && a.out_channels % 64 == 0) {
    const int64_t pool = a.answer.pool, team = a.threads > 1 ? a.threads : 1;
    const int64_t fair = ceil_div(a.height.output, team);
    rows = round_up(least(design.rows(a, wide), fair), pool);
    chunks = ceil_div(a.height.output, rows);
    row_classes = bordered ? count_classes(a.height) : 0;
    column_classes = bordered ? count_classes(a.width) : 0;
    lost = 64;  // behind what holds for the image
    image = lost + round_up(high * wide, 64);
    sums = image + round_up(high * wide * pixel, 64) + 64;  // vectors are read from every pixel on
    places = sums + (summed ? round_up(high * wide * 4, 64) : 0);
    classes = places + round_up(numbers * 4, 64);
    class_of = classes + row_classes * column_classes * padded * 4;
    reals = class_of + (bordered ? round_up((a.height.output + a.width.output) * 4, 64) : 0);  // of which means are asked for
    members = reals + (a.after.pool > 0 ? round_up(a.height.output * a.width.output * a.out_channels * 4, 64) : 0);
    codes = round_up(a.out_channels, 64);
    staged = row_bytes(a) + round_up(a.in_channels, 64) + 64;
    const bool coded = a.answer.numbers != nullptr;
    pixels = staged + (coded && !direct ? round_up(rows * a.width.output * codes, 64) : 0);
    scratch = pixels + round_up(rows * a.width.output * static_cast<int64_t>(sizeof(OutputPixel)), 64);
    member = scratch + design.scratch(a, *this);
  }
  int64_t bytes(int threads) const { return members + (threads > 1 ? threads : 1) * round_up(member, 64); }
};

// Bytes from one gathered window to the next.
inline int64_t gathered_bytes(const ConvPlan& plan) { return plan.numbers * 4 + kGatherPiece; }

}  // namespace
