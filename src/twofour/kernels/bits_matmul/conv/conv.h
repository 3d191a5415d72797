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
#include "image_means.h"
#include "windows.h"

namespace {

// One pixel's codes, whole vectors of them with zeros behind, as the reader wants them.
inline void write_pixel(const PixelCodes& form, const uint8_t* codes, char* to) {
  if (!form.planes) {
    int64_t c = 0;
    for (; c + 64 <= form.bytes(); c += 64) std::memcpy(to + c, codes + c, 64);
    if (c < form.bytes()) std::memcpy(to + c, codes + c, static_cast<size_t>(form.bytes() - c));
    return;
  }
  for (int64_t p = 0; p < form.bits; p++)
    for (int64_t q = 0; q < form.words(); q++) {
      const uint64_t word = PlaneCounts::plane(codes + 64 * q, static_cast<int>(p));
      std::memcpy(to + (p * form.words() + q) * 8, &word, 8);
    }
}

// An image of codes that is read.
inline const char* coded_image(const ReadConv& read, const ConvPlan& plan, int64_t n) {
  return read.conv.x + n * twofour::coded_image_bytes(plan.in, read.pixels());
}

inline int32_t sum_of_pixel(const PixelCodes& form, const char* codes) {
  if (!form.planes) return sum_of_bytes(codes, form.bytes());
  int32_t sum = 0;
  for (int64_t p = 0; p < form.bits; p++)
    for (int64_t q = 0; q < form.words(); q++) {
      uint64_t word;
      std::memcpy(&word, codes + (p * form.words() + q) * 8, 8);
      sum += __builtin_popcountll(word) << p;
    }
  return sum;
}

// The codes of a row of pixels, one behind the other, as the reader wants them. `staged` has room for one more pixel.
inline void write_row(const ConvPlan& plan, int64_t channels, uint8_t* codes, int64_t pixels, uint8_t* staged, char* to) {
  const bool whole = channels % (plan.in.planes ? 64 : 4) == 0;
  if (whole && !plan.in.planes) {
    std::memcpy(to, codes, static_cast<size_t>(pixels * channels));
  } else if (whole) {
    for (int64_t j = 0; j < pixels; j++) write_pixel(plan.in, codes + j * channels, to + j * plan.pixel);
  } else if (plan.pixel == 4) {
    const uint32_t mask = (uint32_t{1} << 8 * channels) - 1;  // the codes of the next pixel stand behind
    for (int64_t j = 0; j < pixels; j++) {
      uint32_t four;
      std::memcpy(&four, codes + j * channels, 4);
      four &= mask;
      std::memcpy(to + j * 4, &four, 4);
    }
  } else {
    std::memset(staged + channels, 0, static_cast<size_t>(round_up(channels, 64) - channels));
    for (int64_t j = 0; j < pixels; j++) {
      std::memcpy(staged, codes + j * channels, static_cast<size_t>(channels));
      write_pixel(plan.in, staged, to + j * plan.pixel);
    }
  }
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
void pack_row(const ReadConv& read, const ConvPlan& plan, int64_t n, int64_t r, ImageFacts* facts, uint8_t* staged) {
  const BitsConv& a = read.conv;
  char* memory = static_cast<char*>(a.workspace);
  char* to = memory + plan.image + r * plan.wide * plan.pixel;
  const int64_t row = r - a.height.padding, first = a.width.padding, channels = a.in_channels;
  const bool inside = 0 <= row && row < a.height.input;
  const int64_t begin = inside ? least(first, plan.wide) : plan.wide;
  const int64_t end = inside ? least(first + a.width.input, plan.wide) : plan.wide;
  std::memset(to, 0, static_cast<size_t>(begin * plan.pixel));
  auto* lost = reinterpret_cast<uint8_t*>(memory + plan.lost) + r * plan.wide;
  std::memset(lost, 0, static_cast<size_t>(plan.wide));
  // Runs of pixels that stand together: all of the row, or one of each.
  const int64_t run = read.columns.step == 1 ? end - begin : 1;
  const auto* numbers = reinterpret_cast<const float*>(a.x);
  bool any = false;
  for (int64_t j = begin; j < end; j += run) {
    const int64_t at = read.rows.at(row) * read.columns.input + read.columns.at(j - begin);
    if (a.coded) {
      const char* from = coded_image(read, plan, n) + twofour::kCodesHead;
      std::memcpy(to + j * plan.pixel, from + at * plan.pixel, static_cast<size_t>(run * plan.pixel));
      if (facts->lost != 0) std::memcpy(lost + j, from + read.pixels() * plan.pixel + at, static_cast<size_t>(run));
    } else {
      const float* from = numbers + (n * read.pixels() + at) * channels;
      any |= mark_lost<V>(from, run, channels, lost + j);
      input_codes<V>(a.quantization, facts->range, from, run * channels, staged + (j - begin) * channels);
    }
  }
  if (any) __atomic_store_n(&facts->lost, 1, __ATOMIC_RELAXED);
  if (!a.coded && end > begin) write_row(plan, channels, staged, end - begin, staged + row_bytes(a), to + begin * plan.pixel);
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
  const float* other;  // of the image, or null
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

// The sums of the codes of the windows of a row of outputs, [begin, end) of it, whose first window begins with pixel `at`.
inline void window_sums(const BitsConv& a, const ConvPlan& plan, int64_t at, int64_t begin, int64_t end, int32_t* to) {
  const auto* sums = reinterpret_cast<const int32_t*>(static_cast<const char*>(a.workspace) + plan.sums) + at;
  const int64_t count = end - begin, stride = a.width.stride;
  std::memset(to, 0, static_cast<size_t>(count) * 4);
  for (int64_t y = 0; y < a.height.taps; y++)
    for (int64_t x = 0; x < a.width.taps; x++) {
      const int32_t* from = sums + y * a.height.dilation * plan.wide + x * a.width.dilation + begin * stride;
      if (stride == 1)
        for (int64_t j = 0; j < count; j++) to[j] += from[j];
      else
        for (int64_t j = 0; j < count; j++) to[j] += from[j * stride];
    }
}

// Pixels of whole rows of outputs, `first` the first of them.
inline void output_pixels(const BitsConv& a, const ConvPlan& plan, const int32_t* sums_of_rows, const ImageFacts& facts,
                          int64_t first, int64_t count, OutputPixel* to) {
  constexpr int64_t together = 64;
  const char* memory = static_cast<const char*>(a.workspace);
  const auto* of = reinterpret_cast<const int32_t*>(memory + plan.class_of);
  const auto* classes = reinterpret_cast<const int32_t*>(memory + plan.classes);
  int32_t sums[together] = {};
  for (int64_t i = first / a.width.output; i < (first + count) / a.width.output; i++) {
    const int64_t row = i * a.height.stride * plan.wide;
    for (int64_t j = 0; j < a.width.output; j++, to++) {
      const int64_t at = row + j * a.width.stride;
      if (plan.summed && j % together == 0) window_sums(a, plan, row, j, least(j + together, a.width.output), sums);
      *to = {at, sums_of_rows, sums[j % together], facts.range.scale};
      if (plan.bordered) to->inside = classes + (of[i] * plan.column_classes + of[a.height.output + j]) * plan.padded;
      if (facts.lost != 0 && is_lost(a, plan, at)) to->scale = __builtin_nanf("");
    }
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
  // What a vector of sums needs, in locals: a store of bytes may change whatever memory holds.
  struct Vector {
    uint32_t times, beside, zero;
    int64_t row, rows;
  };
  Vector vector_at(int64_t row) const {
    const auto factor = static_cast<uint32_t>(a.quantization.x_factor);
    return {factor * static_cast<uint32_t>(w.head.alpha), factor * static_cast<uint32_t>(w.head.beta),
            static_cast<uint32_t>(chunk.facts.range.zero), row, least(V::width, a.out_channels - row)};
  }
  // Values of sums, modulo 2^32.
  static TWOFOUR_INLINE I whole(const Vector& at, I sums, int32_t codes, const int32_t* inside) {
    typedef typename V::U U;
    U v = (U)sums;
    if (at.times != 1) v *= at.times;
    v += at.beside * static_cast<uint32_t>(codes);
    if (at.zero != 0) v -= (U)ints(inside + at.row) * at.zero;
    return (I)v;
  }
  // What real answers of a vector of outputs need. What a call does not ask for changes no bit, so that nothing branches: a
  // product with 1, sums with -0, the greater of -infinity.
  struct Reals {
    typename V::reg bias, scales, factor, shift, least;
    int64_t rows;
    bool normed;

    TWOFOUR_INLINE Reals(const BitsConv& a, const BitsWeight& w, int64_t row)
        : bias(V::all(-0.0f)), scales(V::load_unaligned(w.scales + row)), factor(V::all(1.0f)), shift(V::all(-0.0f)),
          least(V::all(a.after.relu ? 0.0f : -__builtin_inff())), rows(::least(V::width, a.out_channels - row)),
          normed(a.after.scale != nullptr) {
      if (rows <= 0) return;
      if (a.bias != nullptr) bias = V::load(a.bias + row, rows);
      if (normed) factor = V::load(a.after.scale + row, rows), shift = V::load(a.after.shift + row, rows);
    }
    // Of the values' sum; `other` is added to it.
    TWOFOUR_INLINE typename V::reg answer(I sum, float scale, typename V::reg other) const {
      auto y = apart(V::to_real((typename V::ints)sum) * (V::all(scale) * scales)) + bias;
      if (kFused || normed) y = rounded_once<V>(apart(y), factor, shift);  // the sum with the bias is not its
      return V::max(least, y + other);  // a NaN, the second one, stays
    }
  };
  void reals(const int32_t* sums, int64_t tokens, int64_t place, int64_t row) const {
    const Vector at = vector_at(row);
    const Reals answers(a, w, row);
    const OutputPixel* pixel = chunk.pixels + place;
    const int64_t channels = a.out_channels, from = (chunk.first + place) * channels + row;
    float* to = reinterpret_cast<float*>(chunk.answer) + from;
    const float* other = a.after.other == nullptr ? nullptr : chunk.other + from;
    for (; tokens-- > 0; pixel++, sums += V::width, to += channels) {
      const auto added = other == nullptr ? V::all(-0.0f) : V::load(other, answers.rows);
      V::store(to, answers.answer(whole(at, ints(sums), pixel->sum, pixel->inside), pixel->scale, added), answers.rows);
      if (other != nullptr) other += channels;
    }
  }
  // `Most`: of a code, 0 where it varies.
  template <int Most>
  void codes(const int32_t* sums, int64_t tokens, int64_t place, int64_t row) const {
    const Vector at = vector_at(row);
    const int32_t most = Most > 0 ? Most : a.answer.most;
    const int64_t padded = plan.padded, step = plan.codes;
    const int32_t* numbers = a.answer.numbers + row;
    const I flips = ints(numbers);
    const OutputPixel* pixel = chunk.pixels + place;
    uint8_t* to = chunk.codes + place * step + row;
    for (; tokens-- > 0; pixel++, sums += V::width, to += step) {
      const I v = whole(at, ints(sums), pixel->sum, pixel->inside) ^ flips;
      I code{};
      for (int32_t l = 1; l <= most; l++) code -= v >= ints(numbers + l * padded);
      V::store_bytes(to, (typename V::ints)code, at.rows);
    }
  }
  // Sums of a tile, [vectors][stride tokens][V::width], of tokens from `place` of the chunk on and rows from `row` on.
  void tile(const int32_t* sums, int64_t vectors, int64_t stride, int64_t tokens, int64_t place, int64_t row) const {
    for (int64_t v = 0; v < vectors && row < a.out_channels; v++, row += V::width, sums += stride * V::width)
      if (chunk.codes == nullptr) reals(sums, tokens, place, row);
      else if (a.answer.most == 3) codes<3>(sums, tokens, place, row);
      else if (a.answer.most == 1) codes<1>(sums, tokens, place, row);
      else codes<0>(sums, tokens, place, row);
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
  // The codes of a chunk of whole rows, pooled, where the next layer reads them, and their marks.
  TWOFOUR_NOINLINE void emit() const {
    const int64_t pool = a.answer.pool, wide = a.width.output, across = wide / pool;
    const int64_t top = chunk.first / wide / pool, size = a.answer.to.bytes();
    const int64_t marks = twofour::kCodesHead + a.height.output / pool * across * size;
    for (int64_t r = 0; r < chunk.count / wide / pool; r++) {
      const int64_t at = (top + r) * across;
      char* to = chunk.answer + twofour::kCodesHead + at * size;
      uint8_t* one = chunk.codes + r * pool * wide * plan.codes;
      for (int64_t c = 0; !plan.direct && c < across; c++, one += pool * plan.codes, to += size) {
        if (pool == 2) greatest(one, wide * plan.codes);
        write_pixel(a.answer.to, one, to);
      }
      if (chunk.facts.lost == 0) std::memset(chunk.answer + marks + at, 0, static_cast<size_t>(across));
      else
        for (int64_t c = 0; c < across; c++) chunk.answer[marks + at + c] = is_pooled_lost((r * wide + c) * pool);
    }
  }
  // The codes of a pixel become the greatest of it and its neighbours, those of the next row `row` bytes behind.
  void greatest(uint8_t* one, int64_t row) const {
    for (int64_t o = 0; o < plan.codes; o += 64) {
      Codes v[4];
      for (int i = 0; i < 4; i++) std::memcpy(&v[i], one + o + i / 2 * row + i % 2 * plan.codes, 64);
      const Codes upper = v[0] > v[1] ? v[0] : v[1], lower = v[2] > v[3] ? v[2] : v[3];
      const Codes most = upper > lower ? upper : lower;
      std::memcpy(one + o, &most, 64);
    }
  }
  typedef uint8_t Codes __attribute__((vector_size(64)));
};

// Windows of a tile in an image whose first pixel is `image`, of `size` numbers a pixel.
template <class N>
TWOFOUR_INLINE Windows<N> windows_of(const N* image, int64_t size, const int32_t* places, const OutputPixel* pixels, int64_t tokens) {
  Windows<N> found;
  found.places = places, found.more = 0;
  for (int64_t t = 0; t < tokens; t++) found.tokens[t] = image + pixels[t].window * size;
  return found;
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
  static int64_t step(const PixelCodes& in) { return in.words(); }
  static int64_t size(const ConvPlan& plan) { return plan.pixel / 8; }
  static void places(const BitsConv& a, const ConvPlan& plan, int32_t* to) { window_places(a, plan, size(plan), to); }
  static int64_t rows(const BitsConv& a, int64_t) { return ceil_div(kChunkPixels, a.width.output); }
  static int64_t scratch(const BitsConv&, const ConvPlan&) { return 0; }
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
  static constexpr int64_t panel = kBytesPanel, outputs = D::columns * V::width, tokens = D::tokens, inputs = 4;
  static constexpr const char* layout = "bits_bytes";

  const BitsHead& head;
  int64_t blocks;
  bool narrow;
  explicit ByteTiles(const BitsConv& a)
      : head(*static_cast<const BitsHead*>(a.weight)),
        blocks(a.height.taps * a.width.taps * ceil_div(a.in_channels, 4)), narrow(a.quantization.x_most <= 127) {}
  static int64_t step(const PixelCodes& in) { return in.bytes() / 4; }
  static int64_t size(const ConvPlan& plan) { return plan.pixel / 4; }
  static void places(const BitsConv& a, const ConvPlan& plan, int32_t* to) { window_places(a, plan, size(plan), to); }
  static int64_t rows(const BitsConv& a, int64_t) { return ceil_div(kChunkPixels, a.width.output); }
  static int64_t scratch(const BitsConv&, const ConvPlan&) { return 0; }
  static int64_t take(int64_t left) { return ByteTile<D, 8, true, Inputs>::of(left).tokens; }
  void run(const char* from, int64_t row, const Inputs& inputs, int64_t count, int32_t* sums) const {
    const auto run = narrow ? ByteTile<D, 8, true, Inputs>::of(count).run : ByteTile<D, 8, false, Inputs>::of(count).run;
    run(from + row * 4, inputs, blocks, sums);
  }
};

template <class K>
void conv_chunk(const BitsConv& a, const ConvPlan& plan, const BitsWeight& w, const K& tiles, const Chunk& chunk, char*) {
  using V = typename K::V;
  using N = typename K::N;
  const int64_t size = K::size(plan);
  const N* image = reinterpret_cast<const N*>(static_cast<const char*>(a.workspace) + plan.image);
  const ConvFinish<V> finish{a, plan, w, chunk};
  const auto* places = reinterpret_cast<const int32_t*>(static_cast<const char*>(a.workspace) + plan.places);
  alignas(64) int32_t sums[K::tokens * K::outputs];
  if (chunk.codes != nullptr) std::memset(chunk.codes, 0, static_cast<size_t>(chunk.count * plan.codes));
  for (int64_t p = 0; p < w.panels; p++)
    for (int64_t row = 0; row < K::panel && p * K::panel + row < a.out_channels; row += K::outputs)
      for (int64_t t = 0; t < chunk.count;) {
        const int64_t some = K::take(chunk.count - t);
        tiles.run(w.panel(p), row, windows_of<N>(image, size, places, chunk.pixels + t, some), some, sums);
        finish.tile(sums, K::outputs / V::width, some, some, t, p * K::panel + row);
        t += some;
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
  const BitsWeight w(*twofour::bits_layout(K::layout), a.weight, a.out_channels, plan.taps * plan.step * K::inputs);
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
