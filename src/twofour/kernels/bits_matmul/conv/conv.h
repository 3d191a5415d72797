// A convolution of codes: an image becomes codes with zeros around them, windows are tiles of the products of bits_matmul
// (nothing is gathered but the windows of bytes of images of few channels: an input of a window stands a fixed way behind its
// first one), and whole sums become the answer.
// A pixel outside the image has code 0. It adds nothing to a sum of products; of the sum of a row's values, which a zero
// point multiplies, its taps are left out, so that its value is zero in every number system.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "../bytes.h"
#include "../planes.h"
#include "answers.h"
#include "image_means.h"

namespace {

// Copies the codes of each window of a chunk together, `size` bytes from one to the next, a piece of all windows after the
// other. What a piece copies too much the next one overwrites; what comes to stand behind a window meets stored codes of 0.
TWOFOUR_NOINLINE void gather_windows(const BitsConv& a, const ConvPlan& plan, const OutputPixel* pixels, int64_t count, int64_t size,
                                     char* to) {
  const char* image = static_cast<const char*>(a.workspace) + plan.image;
  const int64_t pixel = plan.pixel;
  const bool dense = a.width.dilation == 1;  // then a row of taps is one run
  const int64_t runs = dense ? 1 : a.width.taps, run = dense ? a.width.taps * pixel : pixel;
  for (int64_t y = 0; y < a.height.taps; y++)
    for (int64_t x = 0; x < runs; x++, to += run)
      for (int64_t b = 0; b < run; b += kGatherPiece) {
        const char* from = image + (y * a.height.dilation * plan.wide + x * a.width.dilation) * pixel + b;
        for (int64_t i = 0; i < count; i++) std::memcpy(to + b + i * size, from + pixels[i].window * pixel, kGatherPiece);
      }
}

// Where the inputs of a window stand behind its first one, in numbers of which `size` are a pixel, plan.step of them read.
inline void window_places(const BitsConv& a, const ConvPlan& plan, int64_t size, int32_t* to) {
  for (int64_t y = 0; y < a.height.taps; y++)
    for (int64_t x = 0; x < a.width.taps; x++)
      for (int64_t q = 0; q < plan.step; q++)
        *to++ = static_cast<int32_t>((y * a.height.dilation * plan.wide + x * a.width.dilation) * size + q);
}

template <class P>
struct PlaneTiles {
  using V = typename P::V;
  using N = uint64_t;
  using Inputs = Windows<N>;
  static constexpr bool planes = true;
  static constexpr int64_t panel = kPlanesPanel, outputs = P::columns * P::lanes, tokens = P::tokens, inputs = 64;
  static constexpr const char* layout = "bits_planes";

  const BitsHead& head;
  PlaneShape shape;
  explicit PlaneTiles(const BitsConv& a)
      : head(*static_cast<const BitsHead*>(a.weight)),
        shape{a.height.taps * a.width.taps * ceil_div(a.in_channels, 64), head.bits, bits_of(a.quantization.x_most),
              ceil_div(a.in_channels, 64)} {}
  static bool gathered(const BitsConv&) { return false; }
  static int64_t step(const PixelCodes& in) { return in.words(); }
  static int64_t size(const ConvPlan& plan) { return plan.pixel / 8; }
  static void places(const BitsConv& a, const ConvPlan& plan, int32_t* to) { window_places(a, plan, size(plan), to); }
  static int64_t rows(const BitsConv& a, int64_t) { return ceil_div(kChunkPixels, a.width.output); }
  static int64_t scratch(const BitsConv&, const ConvPlan&) { return 0; }
  static int64_t take(int64_t left) { return left >= tokens ? tokens : 1; }
  void run(const char* from, int64_t row, const Inputs& inputs, int64_t count, int32_t* sums, int64_t stride) const {
    const auto* weights = reinterpret_cast<const uint64_t*>(from) + row;
    (count == tokens ? plane_tile<P, P::tokens, Inputs> : plane_tile<P, 1, Inputs>)(weights, inputs, shape, stride, sums);
  }
};

template <class D>
struct ByteTiles {
  using V = typename D::V;
  using N = uint32_t;
  using Inputs = Windows<N>;
  static constexpr bool planes = false;
  static constexpr int64_t panel = kBytesPanel, outputs = D::columns * V::width, tokens = D::tokens, inputs = 4;
  static constexpr const char* layout = "bits_bytes";

  const BitsHead& head;
  int64_t blocks;
  bool narrow;
  explicit ByteTiles(const BitsConv& a)
      : head(*static_cast<const BitsHead*>(a.weight)),
        blocks(ceil_div(a.height.taps * a.width.taps * twofour::tap_inputs(4, a.in_channels), 4)), narrow(a.quantization.x_most <= 127) {}
  static bool gathered(const BitsConv& a) { return twofour::gathers(4, a.in_channels); }
  static int64_t step(const PixelCodes& in) { return in.bytes() / 4; }
  static int64_t size(const ConvPlan& plan) { return plan.pixel / 4; }
  static void places(const BitsConv& a, const ConvPlan& plan, int32_t* to) {
    if (!gathered(a)) return window_places(a, plan, size(plan), to);
    for (int64_t i = 0; i < plan.numbers; i++) to[i] = static_cast<int32_t>(i);
  }
  static int64_t rows(const BitsConv& a, int64_t) { return ceil_div(kChunkPixels, a.width.output); }
  static int64_t scratch(const BitsConv& a, const ConvPlan& plan) {
    return gathered(a) ? round_up(plan.rows * a.width.output * gathered_bytes(plan), 64) : 0;
  }
  static int64_t take(int64_t left) { return ByteTile<D, 8, true, Inputs>::of(left).tokens; }
  void run(const char* from, int64_t row, const Inputs& inputs, int64_t count, int32_t* sums, int64_t stride) const {
    const auto run = narrow ? ByteTile<D, 8, true, Inputs>::of(count).run : ByteTile<D, 8, false, Inputs>::of(count).run;
    run(from + row * 4, inputs, blocks, sums, stride);
  }
};

template <class K>
void conv_chunk(const BitsConv& a, const ConvPlan& plan, const BitsWeight& w, const K& tiles, const Chunk& chunk, char* scratch) {
  using V = typename K::V;
  using N = typename K::N;
  const int64_t size = K::size(plan), window = gathered_bytes(plan) / static_cast<int64_t>(sizeof(N));
  const bool gathered = K::gathered(a);
  const auto *image = reinterpret_cast<const N*>(static_cast<const char*>(a.workspace) + plan.image), *windows = reinterpret_cast<const N*>(scratch);
  if (gathered) gather_windows(a, plan, chunk.pixels, chunk.count, gathered_bytes(plan), scratch);
  const ConvFinish<V> finish{a, plan, w, chunk};
  const auto* places = reinterpret_cast<const int32_t*>(static_cast<const char*>(a.workspace) + plan.places);
  alignas(64) int32_t sums[kTogether * K::outputs];
  if (chunk.codes != nullptr && plan.codes != a.out_channels) std::memset(chunk.codes, 0, static_cast<size_t>(chunk.count * plan.codes));
  for (int64_t p = 0; p < w.panels; p++)
    for (int64_t row = 0; row < K::panel && p * K::panel + row < a.out_channels; row += K::outputs)
      for (int64_t t = 0; t < chunk.count; t += kTogether) {
        const int64_t count = least(kTogether, chunk.count - t);
        for (int64_t i = 0, some; i < count; i += some) {
          some = K::take(count - i);
          Windows<N> inputs{{}, places, 0};
          for (int64_t j = 0, at = t + i; j < some; j++, at++)
            inputs.tokens[j] = gathered ? windows + at * window : image + chunk.pixels[at].window * size;
          tiles.run(w.panel(p), row, inputs, some, sums + i * V::width, kTogether);
        }
        finish.template tile<K::outputs / V::width>(sums, kTogether, count, t, p * K::panel + row);
      }
  if (chunk.codes != nullptr) finish.emit();
}

template <class K>
int64_t conv_workspace(const BitsConv& a) {
  return ConvPlan(ReadConv(a).conv, K(a)).bytes(a.threads);
}

template <class K>
void conv_images(const BitsConv& given) {
  using V = typename K::V;
  const ReadConv read(given);
  const BitsConv& a = read.conv;
  const K tiles(a);
  const ConvPlan plan(a, tiles);
  const BitsWeight w(*twofour::bits_layout(K::layout), a.weight, a.out_channels, plan.numbers * K::inputs);
  char* memory = static_cast<char*>(a.workspace);
  auto* facts = reinterpret_cast<ImageFacts*>(memory);
  K::places(a, plan, reinterpret_cast<int32_t*>(memory + plan.places));
  if (plan.bordered) {
    auto* of = reinterpret_cast<int32_t*>(memory + plan.class_of);
    count_classes(a.height, of);
    count_classes(a.width, of + a.height.output);
    class_sums(a, plan.padded, reinterpret_cast<int32_t*>(memory + plan.classes));
  }
  const int64_t pool = a.answer.pool, pixels = a.height.output * a.width.output;
  const bool means = a.after.pool > 0;
  const int64_t answer = a.answer.numbers == nullptr
                             ? (means ? 1 : pixels) * a.out_channels * 4
                             : twofour::coded_image_bytes(a.answer.to, a.height.output / pool * (a.width.output / pool));
  with_team(a.threads, [&](const Team& team) {
    auto* staged = reinterpret_cast<uint8_t*>(memory + plan.members + team.me * round_up(plan.member, 64));
    int64_t r0, r1, c0, c1;
    team.share(plan.high, 1, &r0, &r1);
    team.share(plan.chunks, 1, &c0, &c1);
    for (int64_t n = 0; n < a.images; n++) {
      if (team.me == 0) {
        const int64_t numbers = read.pixels() * a.in_channels;
        if (a.coded) *facts = {{a.quantization.x_scale, a.quantization.x_zero}, static_cast<uint8_t>(*coded_image(read, plan, n) != 0)};
        else *facts = {input_range<V>(a.quantization, reinterpret_cast<const float*>(a.x) + n * numbers, numbers), 0};
      }
      team.barrier();
      for (int64_t r = r0; r < r1; r++) pack_row<V>(read, plan, n, r, facts, staged);
      team.barrier();
      for (int64_t c = c0; c < c1; c++) {
        const int64_t rows = least(plan.rows, a.height.output - c * plan.rows), first = c * plan.rows * a.width.output;
        uint8_t* codes = a.answer.numbers == nullptr ? nullptr : staged + plan.staged;
        if (plan.direct) codes = reinterpret_cast<uint8_t*>(a.y + n * answer + twofour::kCodesHead + first * plan.codes);
        auto* outputs = reinterpret_cast<OutputPixel*>(staged + plan.pixels);
        const float* other = a.after.other == nullptr ? nullptr : a.after.other + n * pixels * a.out_channels;
        output_pixels(a, plan, w.sums, *facts, first, rows * a.width.output, outputs);
        conv_chunk(a, plan, w, tiles,
                      {first, rows * a.width.output, means ? memory + plan.reals : a.y + n * answer, other, codes, outputs, *facts},
                      reinterpret_cast<char*>(staged) + plan.scratch);
      }
      if (team.me == 0 && a.answer.numbers != nullptr) {
        std::memset(a.y + n * answer, 0, twofour::kCodesHead);
        a.y[n * answer] = static_cast<char>(facts->lost);
      }
      team.barrier();  // the image is still being read
      if (team.me == 0 && means)
        image_means<V>(a, reinterpret_cast<const float*>(memory + plan.reals), reinterpret_cast<float*>(a.y + n * answer));
    }
  });
}

}  // namespace
