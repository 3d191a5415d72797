// A convolution of codes: an image becomes codes with zeros around them, windows are tiles of the products of bits_matmul
// (nothing is gathered: an input of a window stands a fixed way behind its first one), and whole sums become the answer.
// A pixel outside the image has code 0. It adds nothing to a sum of products; of the sum of a row's values, which a zero
// point multiplies, its taps are left out, so that its value is zero in every number system.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "../bytes.h"
#include "../planes.h"
#include "windows.h"

namespace {

// One pixel's codes, whole vectors of them with zeros behind, as the reader wants them.
inline void write_pixel(const PixelCodes& form, const uint8_t* codes, char* to) {
  if (!form.planes) {
    std::memcpy(to, codes, static_cast<size_t>(form.bytes()));
    return;
  }
  for (int64_t p = 0; p < form.bits; p++)
    for (int64_t q = 0; q < form.words(); q++) {
      const uint64_t word = PlaneCounts::plane(codes + 64 * q, static_cast<int>(p));
      std::memcpy(to + (p * form.words() + q) * 8, &word, 8);
    }
}

// An image of codes that is read.
inline const char* coded_image(const BitsConv& a, const ConvPlan& plan, int64_t n) {
  return a.x + n * twofour::coded_image_bytes(plan.in, a.height.input * a.width.input);
}

inline int32_t sum_of_pixel(const PixelCodes& form, const char* codes) {
  int32_t sum = 0;
  if (!form.planes) {
    for (int64_t c = 0; c < form.bytes(); c++) sum += static_cast<uint8_t>(codes[c]);
    return sum;
  }
  for (int64_t p = 0; p < form.bits; p++)
    for (int64_t q = 0; q < form.words(); q++) {
      uint64_t word;
      std::memcpy(&word, codes + (p * form.words() + q) * 8, 8);
      sum += __builtin_popcountll(word) << p;
    }
  return sum;
}

// Marks the pixels of a row of a real image that hold NaN; returns whether there are any.
template <class V>
bool mark_lost(const float* x, int64_t pixels, int64_t channels, uint8_t* lost) {
  if (!holds_nan<V>(x, pixels * channels)) return false;
  for (int64_t j = 0; j < pixels; j++) lost[j] = holds_nan<V>(x + j * channels, channels);
  return true;
}

// Row `r` of the padded image `n`, and the sums of its pixels' codes.
template <class V>
void pack_row(const BitsConv& a, const ConvPlan& plan, int64_t n, int64_t r, ImageFacts* facts, uint8_t* staged) {
  char* memory = static_cast<char*>(a.workspace);
  char* to = memory + plan.image + r * plan.wide * plan.pixel;
  const int64_t row = r - a.height.padding, first = a.width.padding;
  const bool inside = 0 <= row && row < a.height.input;
  const int64_t begin = inside ? least(first, plan.wide) : plan.wide;
  const int64_t end = inside ? least(first + a.width.input, plan.wide) : plan.wide;
  std::memset(to, 0, static_cast<size_t>(begin * plan.pixel));
  auto* lost = reinterpret_cast<uint8_t*>(memory + plan.lost) + r * plan.wide;
  std::memset(lost, 0, static_cast<size_t>(plan.wide));
  if (a.coded && inside) {
    const char* from = coded_image(a, plan, n) + twofour::kCodesHead;
    const char* marks = from + a.height.input * a.width.input * plan.pixel;
    std::memcpy(to + begin * plan.pixel, from + row * a.width.input * plan.pixel, static_cast<size_t>((end - begin) * plan.pixel));
    if (facts->lost != 0) std::memcpy(lost + begin, marks + row * a.width.input, static_cast<size_t>(end - begin));
  } else if (inside) {
    const auto* from = reinterpret_cast<const float*>(a.x) + (n * a.height.input + row) * a.width.input * a.in_channels;
    if (mark_lost<V>(from, end - begin, a.in_channels, lost + begin)) __atomic_store_n(&facts->lost, 1, __ATOMIC_RELAXED);
    for (int64_t j = begin; j < end; j++, from += a.in_channels) {
      input_codes<V>(a.quantization, facts->range, from, a.in_channels, staged);
      std::memset(staged + a.in_channels, 0, static_cast<size_t>(plan.staged - a.in_channels));
      write_pixel(plan.in, staged, to + j * plan.pixel);
    }
  }
  std::memset(to + end * plan.pixel, 0, static_cast<size_t>((plan.wide - end) * plan.pixel));
  if (!plan.summed) return;
  auto* sums = reinterpret_cast<int32_t*>(memory + plan.sums) + r * plan.wide;
  for (int64_t j = 0; j < plan.wide; j++)
    sums[j] = begin <= j && j < end ? sum_of_pixel(plan.in, to + j * plan.pixel) : 0;
}

// What the outputs of a chunk share: pixels [first, first + count) of an image, in order of rows.
struct Chunk {
  int64_t first, count;
  char* answer;    // of the image
  uint8_t* codes;  // of the pixels, where the answer is of codes
  const OutputPixel* pixels;
  ImageFacts facts;
};

// Whether a window holds a pixel that is lost.
inline bool is_lost(const BitsConv& a, const ConvPlan& plan, int64_t at) {
  const auto* lost = static_cast<const uint8_t*>(a.workspace) + plan.lost + at;
  for (int64_t y = 0; y < a.height.taps; y++)
    for (int64_t x = 0; x < a.width.taps; x++)
      if (lost[y * a.height.dilation * plan.wide + x * a.width.dilation] != 0) return true;
  return false;
}

inline void output_pixels(const BitsConv& a, const ConvPlan& plan, const int32_t* sums_of_rows, const ImageFacts& facts,
                          int64_t first, int64_t count, OutputPixel* to) {
  const char* memory = static_cast<const char*>(a.workspace);
  const auto* sums = reinterpret_cast<const int32_t*>(memory + plan.sums);
  const auto* of = reinterpret_cast<const int32_t*>(memory + plan.class_of);
  const auto* classes = reinterpret_cast<const int32_t*>(memory + plan.classes);
  int64_t i = first / a.width.output, j = first % a.width.output;
  for (int64_t t = 0; t < count; t++, to++) {
    const int64_t at = i * a.height.stride * plan.wide + j * a.width.stride;
    *to = {memory + plan.image + at * plan.pixel, sums_of_rows, 0, facts.range.scale};
    if (plan.bordered) to->inside = classes + (of[i] * plan.column_classes + of[a.height.output + j]) * plan.padded;
    if (facts.lost != 0 && is_lost(a, plan, at)) to->scale = __builtin_nanf("");
    if (plan.summed)
      for (int64_t y = 0; y < a.height.taps; y++)
        for (int64_t x = 0; x < a.width.taps; x++)
          to->sum += sums[at + y * a.height.dilation * plan.wide + x * a.width.dilation];
    if (++j == a.width.output) j = 0, i++;
  }
}

// From sums over stored codes of V::width rows from `row` on to the answer, for tokens of a tile.
template <class V>
struct ConvFinish {
  using I = typename V::I;
  const BitsConv& a;
  const ConvPlan& plan;
  const BitsWeight& w;
  const Chunk& chunk;

  static TWOFOUR_INLINE I ints(const int32_t* p) {
    I v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  TWOFOUR_INLINE I whole(const int32_t* sums, int32_t codes, const int32_t* inside, int64_t row) const {
    typedef typename V::U U;
    const auto factor = static_cast<uint32_t>(a.quantization.x_factor);
    const uint32_t times = factor * static_cast<uint32_t>(w.head.alpha);
    const uint32_t more = factor * static_cast<uint32_t>(w.head.beta) * static_cast<uint32_t>(codes);
    U v = (U)ints(sums) * times + more;
    if (chunk.facts.range.zero != 0) v -= (U)ints(inside + row) * static_cast<uint32_t>(chunk.facts.range.zero);
    return (I)v;
  }
  void reals(I v, int64_t pixel, int64_t row, float scale) const {
    const int64_t rows = least(V::width, a.out_channels - row);
    const auto bias = a.bias == nullptr ? V::zero() : V::load(a.bias + row, rows);
    typename V::reg y = V::to_real((typename V::ints)v) * (V::all(scale) * V::load_unaligned(w.scales + row));
#if defined(__x86_64__)
    asm("" : "+v"(y));  // rounded before the sum, as the reference does
#elif defined(__aarch64__)
    asm("" : "+w"(y));
#endif
    V::store(reinterpret_cast<float*>(chunk.answer) + pixel * a.out_channels + row, y + bias, rows);
  }
  void codes(I v, int64_t place, int64_t row) const {
    const int32_t* numbers = a.answer.numbers + row;
    v ^= ints(numbers);
    I code{};
    for (int32_t l = 0; l < a.answer.most; l++) {
      numbers += plan.padded;
      code -= v >= ints(numbers);
    }
    uint8_t* to = chunk.codes + place * plan.codes + row;
    V::store_bytes(to, (typename V::ints)code, least(V::width, a.out_channels - row));
  }
  // Sums of a tile, [vectors][stride tokens][V::width], of tokens from `place` of the chunk on and rows from `row` on.
  void tile(const int32_t* sums, int64_t vectors, int64_t stride, int64_t tokens, int64_t place, int64_t row) const {
    for (int64_t t = 0; t < tokens; t++) {
      const OutputPixel& pixel = chunk.pixels[place + t];
      for (int64_t v = 0; v < vectors && row + v * V::width < a.out_channels; v++) {
        const I found = whole(sums + (v * stride + t) * V::width, pixel.sum, pixel.inside, row + v * V::width);
        if (chunk.codes != nullptr) codes(found, place + t, row + v * V::width);
        else reals(found, chunk.first + place + t, row + v * V::width, pixel.scale);
      }
    }
  }
  // Whether one of the pixels that are pooled, the first of them at `place`, is lost: the greatest of a NaN and a number is NaN.
  bool is_pooled_lost(int64_t place) const {
    bool any = false;
    for (int64_t y = 0; y < a.answer.pool; y++)
      for (int64_t x = 0; x < a.answer.pool; x++) {
        const float scale = chunk.pixels[place + y * a.width.output + x].scale;
        any |= scale != scale;
      }
    return any;
  }
  // The codes of a chunk of whole rows, pooled, where the next layer reads them.
  void emit() const {
    const int64_t pool = a.answer.pool, wide = a.width.output, across = wide / pool;
    const int64_t top = chunk.first / wide / pool, size = a.answer.to.bytes();
    const int64_t marks = twofour::kCodesHead + a.height.output / pool * across * size;
    for (int64_t r = 0; r < chunk.count / wide / pool; r++)
      for (int64_t c = 0; c < across; c++) {
        uint8_t* one = chunk.codes + (r * pool * wide + c * pool) * plan.codes;
        if (pool == 2) {
          const uint8_t *right = one + plan.codes, *below = one + wide * plan.codes, *last = below + plan.codes;
          for (int64_t o = 0; o < plan.codes; o++) {
            const uint8_t upper = one[o] > right[o] ? one[o] : right[o], lower = below[o] > last[o] ? below[o] : last[o];
            one[o] = upper > lower ? upper : lower;
          }
        }
        const int64_t at = (top + r) * across + c;
        write_pixel(a.answer.to, one, chunk.answer + twofour::kCodesHead + at * size);
        chunk.answer[marks + at] = chunk.facts.lost != 0 && is_pooled_lost(r * pool * wide + c * pool);
      }
  }
};

template <class N>
TWOFOUR_INLINE Windows<N> windows_of(const int32_t* places, const OutputPixel* pixels, int64_t tokens) {
  Windows<N> found;
  found.places = places, found.more = 0;
  for (int64_t t = 0; t < tokens; t++) found.tokens[t] = reinterpret_cast<const N*>(pixels[t].window);
  return found;
}

template <class P>
struct PlaneTiles {
  using V = typename P::V;
  using N = uint64_t;
  using Inputs = Windows<N>;
  static constexpr bool planes = true;
  static constexpr int64_t panel = kPlanesPanel, outputs = P::columns * P::lanes, tokens = P::tokens;
  static constexpr const char* layout = "bits_planes";

  PlaneShape shape;
  PlaneTiles(const BitsConv&, const ConvPlan& plan, const BitsWeight& w)
      : shape{plan.taps * plan.step, w.head.bits, plan.in.bits, plan.step} {}
  static int64_t take(int64_t left) { return left >= tokens ? tokens : 1; }
  void run(const char* from, int64_t row, const Inputs& inputs, int64_t count, int32_t* sums) const {
    const auto* weights = reinterpret_cast<const uint64_t*>(from) + row;
    (count == tokens ? plane_tile<P, P::tokens, Inputs> : plane_tile<P, 1, Inputs>)(weights, inputs, shape, count, sums);
  }
};

template <class D>
struct ByteTiles {
  using V = typename D::V;
  using N = uint32_t;
  using Inputs = Windows<N>;
  static constexpr bool planes = false;
  static constexpr int64_t panel = kBytesPanel, outputs = D::columns * V::width, tokens = D::tokens;
  static constexpr const char* layout = "bits_bytes";

  int64_t blocks;
  bool narrow;
  ByteTiles(const BitsConv& a, const ConvPlan& plan, const BitsWeight&)
      : blocks(plan.taps * plan.step), narrow(a.quantization.x_most <= 127) {}
  static int64_t take(int64_t left) { return ByteTile<D, 8, true, Inputs>::of(left).tokens; }
  void run(const char* from, int64_t row, const Inputs& inputs, int64_t count, int32_t* sums) const {
    const auto run = narrow ? ByteTile<D, 8, true, Inputs>::of(count).run : ByteTile<D, 8, false, Inputs>::of(count).run;
    run(from + row * 4, inputs, blocks, sums);
  }
};

template <class K>
ConvPlan conv_plan(const BitsConv& a) {
  const auto& head = *static_cast<const BitsHead*>(a.weight);
  return {a, K::planes, K::panel, bits_of(a.quantization.x_most), sizeof(typename K::N), head.alpha, head.beta};
}

template <class K>
void conv_chunk(const BitsConv& a, const ConvPlan& plan, const BitsWeight& w, const K& tiles, const Chunk& chunk) {
  using V = typename K::V;
  const ConvFinish<V> finish{a, plan, w, chunk};
  const auto* places = reinterpret_cast<const int32_t*>(static_cast<const char*>(a.workspace) + plan.places);
  alignas(64) int32_t sums[K::tokens * K::outputs];
  if (chunk.codes != nullptr) std::memset(chunk.codes, 0, static_cast<size_t>(chunk.count * plan.codes));
  for (int64_t p = 0; p < w.panels; p++)
    for (int64_t row = 0; row < K::panel && p * K::panel + row < a.out_channels; row += K::outputs)
      for (int64_t t = 0; t < chunk.count;) {
        const int64_t some = K::take(chunk.count - t);
        tiles.run(w.panel(p), row, windows_of<typename K::N>(places, chunk.pixels + t, some), some, sums);
        finish.tile(sums, K::outputs / V::width, some, some, t, p * K::panel + row);
        t += some;
      }
  if (chunk.codes != nullptr) finish.emit();
}

template <class K>
void conv_places(const BitsConv& a, const ConvPlan& plan, int32_t* to) {
  const int64_t units = plan.pixel / static_cast<int64_t>(sizeof(typename K::N));
  for (int64_t y = 0; y < a.height.taps; y++)
    for (int64_t x = 0; x < a.width.taps; x++)
      for (int64_t q = 0; q < plan.step; q++)
        *to++ = static_cast<int32_t>((y * a.height.dilation * plan.wide + x * a.width.dilation) * units + q);
}

template <class K>
void conv_images(const BitsConv& a) {
  using V = typename K::V;
  const ConvPlan plan = conv_plan<K>(a);
  const BitsWeight w(*twofour::bits_layout(K::layout), a.weight, a.out_channels,
                     plan.taps * plan.step * (K::planes ? 64 : 4));
  const K tiles(a, plan, w);
  char* memory = static_cast<char*>(a.workspace);
  auto* facts = reinterpret_cast<ImageFacts*>(memory);
  conv_places<K>(a, plan, reinterpret_cast<int32_t*>(memory + plan.places));
  if (plan.bordered) {
    auto* of = reinterpret_cast<int32_t*>(memory + plan.class_of);
    count_classes(a.height, of);
    count_classes(a.width, of + a.height.output);
    class_sums(a, plan.padded, reinterpret_cast<int32_t*>(memory + plan.classes));
  }
  const int64_t pool = a.answer.pool, pixels = a.height.output * a.width.output;
  const int64_t answer = a.answer.numbers == nullptr
                             ? pixels * a.out_channels * 4
                             : twofour::coded_image_bytes(a.answer.to, a.height.output / pool * (a.width.output / pool));
  with_team(a.threads, [&](const Team& team) {
    auto* staged = reinterpret_cast<uint8_t*>(memory + plan.members + team.me * round_up(plan.member, 64));
    int64_t r0, r1, c0, c1;
    team.share(plan.high, 1, &r0, &r1);
    team.share(plan.chunks, 1, &c0, &c1);
    for (int64_t n = 0; n < a.images; n++) {
      if (team.me == 0) {
        const int64_t numbers = a.height.input * a.width.input * a.in_channels;
        if (a.coded) *facts = {{a.quantization.x_scale, a.quantization.x_zero}, static_cast<uint8_t>(*coded_image(a, plan, n) != 0)};
        else *facts = {input_range<V>(a.quantization, reinterpret_cast<const float*>(a.x) + n * numbers, numbers), 0};
      }
      team.barrier();
      for (int64_t r = r0; r < r1; r++) pack_row<V>(a, plan, n, r, facts, staged);
      team.barrier();
      for (int64_t c = c0; c < c1; c++) {
        const int64_t rows = least(plan.rows, a.height.output - c * plan.rows), first = c * plan.rows * a.width.output;
        uint8_t* codes = a.answer.numbers == nullptr ? nullptr : staged + plan.staged;
        auto* outputs = reinterpret_cast<OutputPixel*>(staged + plan.pixels);
        output_pixels(a, plan, w.sums, *facts, first, rows * a.width.output, outputs);
        conv_chunk<K>(a, plan, w, tiles,
                      {first, rows * a.width.output, a.y + n * answer, codes, outputs, *facts});
      }
      if (team.me == 0 && a.answer.numbers != nullptr) {
        std::memset(a.y + n * answer, 0, twofour::kCodesHead);
        a.y[n * answer] = static_cast<char>(facts->lost);
      }
      team.barrier();  // the image is still being read
    }
  });
}

}  // namespace
