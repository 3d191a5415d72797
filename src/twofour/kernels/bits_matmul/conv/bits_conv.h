// y = conv(x, W) + bias, x and W whole numbers of 1 to 8 bits, answered in reals or in the codes that the next layer reads:
// the call, the table of kernels, and how the codes of an image stand.
#pragma once

#include <cstdint>

#include "kernels/conv_axis.h"
#include "kernels/matmul.h"
#include "native/integers.h"
#include "native/table.h"

namespace twofour {

// The codes of a pixel: bytes, filled up with zeros to a multiple of four, or planes of words of 64 bits, the lowest first.
struct PixelCodes {
  bool planes;
  int64_t channels, bits;

  int64_t words() const { return ceil_div(channels, 64); }  // of a plane
  int64_t bytes() const { return planes ? bits * words() * 8 : round_up(channels, 4); }
};

// Inputs that a tap of a window has in a weight, for a row that reads `unit` channels together. Of bytes of fewer channels
// than four, most of what fills them up would be multiplied: such rows copy the codes of a window together, and none is.
inline bool gathers(int64_t unit, int64_t channels) { return unit == 4 && channels < 4; }
inline int64_t tap_inputs(int64_t unit, int64_t channels) { return gathers(unit, channels) ? channels : round_up(channels, unit); }

// Codes of an image stand behind kCodesHead bytes. The first of these says whether pixels were computed from NaN: then a byte
// for each pixel behind the codes, 1 or 0, says which, and windows that read them are NaN.
constexpr int64_t kCodesHead = 64;
inline int64_t coded_image_bytes(const PixelCodes& form, int64_t pixels) { return kCodesHead + pixels * (form.bytes() + 1); }

// Codes of an answer: the code of a sum v is how many of `most` thresholds (v ^ flip) reaches, of four bits at most. Numbers
// of an output stand a padded row of outputs apart: flips, then the thresholds of each level.
struct Requantised {
  const int32_t* numbers;  // null: the answer is real
  int32_t most;
  PixelCodes to;
  int64_t pool;  // 1, or 2: the greatest of 2 x 2 pixels; a last odd row or column is left out
};

// The greatest code whose sums tables of bytes hold, and bytes of the tables of one row of windows.
constexpr int64_t kLookupsCode = 15;
constexpr double kLookupsBytes = double(int64_t{1} << 31);

// What becomes of a real answer v, after its bias: relu(v scale + shift + other), the product and the first sum rounded once
// as torch's batch normalisation does. Each may be null or false; scale and shift are there together.
struct AfterConv {
  const float *scale, *shift, *other;  // of outputs; of every number of the answer, which it stands as
  bool relu;
  int64_t pool;  // 0; 1 or 2: of an image's answers, or of the greatest of 2 x 2, the means alone are stored, a number an output
};

// One call. Images have their channels densest. `weight` is a layout of bits.h with (taps, codes of a pixel) inputs an output
// and, behind it, the sum of an output's values at each tap, a padded row of outputs for each. `bias` may be null.
struct BitsConv {
  const char* x;
  bool coded;  // x holds codes as the row reads them, else float32
  const void* weight;
  const int32_t* tap_sums;
  const float* bias;
  char* y;
  int64_t images, in_channels, out_channels;
  ConvAxis height, width;
  Quantization quantization;
  Requantised answer;
  AfterConv after;
  int threads;
  void* workspace;
};

struct BitsConvKernel : RowBase {
  int64_t unit;  // channels of a pixel that it reads together, zeros behind the last: 64 of planes, 4 bytes, 6 of a table
  int64_t (*workspace_bytes)(const BitsConv&);
  void (*run)(const BitsConv&);
};

#define TWOFOUR_ROW(symbol, ...)                     \
  int64_t symbol##__workspace(const BitsConv& args); \
  void symbol(const BitsConv& args);
#include "bits_conv.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
