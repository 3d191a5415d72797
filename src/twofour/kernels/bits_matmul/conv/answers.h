// From whole sums of windows to a convolution's answer: real numbers, or the codes that the next one reads, pooled.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/rounded_once.h"
#include "packed_image.h"

namespace {

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
TWOFOUR_NOINLINE bool is_lost(const BitsConv& a, const ConvPlan& plan, int64_t at) {
  const auto* lost = static_cast<const uint8_t*>(a.workspace) + plan.lost + at;
  for (int64_t y = 0; y < a.height.taps; y++)
    for (int64_t x = 0; x < a.width.taps; x++)
      if (lost[y * a.height.dilation * plan.wide + x * a.width.dilation] != 0) return true;
  return false;
}

// The sums of the codes of the windows of a row of outputs, [begin, end) of it, whose first window begins with pixel `at`.
TWOFOUR_NOINLINE void window_sums(const BitsConv& a, const ConvPlan& plan, int64_t at, int64_t begin, int64_t end, int32_t* to) {
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
TWOFOUR_NOINLINE void output_pixels(const BitsConv& a, const ConvPlan& plan, const int32_t* sums_of_rows, const ImageFacts& facts,
                          int64_t first, int64_t count, OutputPixel* to) {
  constexpr int64_t together = 64;
  const char* memory = static_cast<const char*>(a.workspace);
  const auto *of = reinterpret_cast<const int32_t*>(memory + plan.class_of), *columns = of + a.height.output;
  const auto* classes = reinterpret_cast<const int32_t*>(memory + plan.classes);
  int32_t sums[together] = {};
  const int64_t wide = a.width.output, stride = a.width.stride, padded = plan.padded;
  const bool summed = plan.summed, bordered = plan.bordered, lost = facts.lost != 0;
  for (int64_t i = first / wide; i < (first + count) / wide; i++) {
    const int64_t row = i * a.height.stride * plan.wide;
    const int32_t* inside = bordered ? classes + of[i] * plan.column_classes * padded : sums_of_rows;
    for (int64_t begin = 0; begin < wide; begin += together) {
      const int64_t some = least(together, wide - begin), at = row + begin * stride;
      if (summed) window_sums(a, plan, row, begin, begin + some, sums);
      for (int64_t j = 0; j < some; j++) {
        int32_t sum = sums[j];
        asm("" : "+r"(sum));  // no vectors: they take 10 KB and no less time
        to[j] = {at + j * stride, bordered ? inside + columns[begin + j] * padded : inside, sum, facts.range.scale};
      }
      for (int64_t j = 0; lost && j < some; j++)
        if (is_lost(a, plan, at + j * stride)) to[j].scale = __builtin_nanf("");
      to += some;
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
  // What the zero point takes off sums of N vectors: neighbouring pixels mostly have the same taps inside the image.
  template <int N>
  struct Outside {
    const int32_t* inside = nullptr;
    typename V::U of[N] = {};

    TWOFOUR_INLINE void move(const Vector& at, const int32_t* to) {
      if (at.zero == 0 || to == inside) return;
      inside = to;
      TWOFOUR_UNROLL
      for (int n = 0; n < N; n++) of[n] = (typename V::U)ints(to + at.row + n * V::width) * at.zero;
    }
  };
  // Values of sums, modulo 2^32.
  static TWOFOUR_INLINE I whole(const Vector& at, I sums, int32_t codes, typename V::U outside) {
    auto v = (typename V::U)sums;
    if (at.times != 1) v *= at.times;
    return (I)(v + at.beside * static_cast<uint32_t>(codes) - outside);
  }
  // How many levels a value has reached, with this one.
  static TWOFOUR_INLINE I reached(I before, I v, I level) {
#if defined(TWOFOUR_SET_avx512)
    const __mmask16 here = _mm512_cmpge_epi32_mask((__m512i)v, (__m512i)level);
    return (I)_mm512_mask_sub_epi32((__m512i)before, here, (__m512i)before, _mm512_set1_epi32(-1));
#else
    return before - (v >= level);
#endif
  }
  // What real answers of a vector of outputs need. What a call does not ask for changes no bit, so that nothing branches: a
  // product with 1, sums with -0, the greater of -infinity.
  struct Reals {
    typename V::reg bias, scales, factor, shift, least;
    int64_t rows;

    TWOFOUR_INLINE Reals(const BitsConv& a, const BitsWeight& w, int64_t row)
        : bias(V::all(-0.0f)), scales(V::load_unaligned(w.scales + row)), factor(V::all(1.0f)), shift(V::all(-0.0f)),
          least(V::all(a.after.relu ? 0.0f : -__builtin_inff())), rows(::least(V::width, a.out_channels - row)) {
      if (rows <= 0) return;
      if (a.bias != nullptr) bias = V::load(a.bias + row, rows);
      if (a.after.scale == nullptr) return;
      factor = V::load(a.after.scale + row, rows);
      shift = V::load(a.after.shift + row, rows);
    }
    // Of the values' sum; `other` is added to it.
    TWOFOUR_INLINE typename V::reg answer(I sum, float scale, typename V::reg other) const {
      auto y = apart(V::to_real((typename V::ints)sum) * (V::all(scale) * scales)) + bias;
      y = rounded_once<V>(apart(y), factor, shift);  // the sum with the bias is not its
      return V::max(least, y + other);  // a NaN, the second one, stays
    }
  };
  TWOFOUR_NOINLINE void reals(const int32_t* sums, int64_t tokens, int64_t place, int64_t row) const {
    const Vector at = vector_at(row);
    const Reals answers(a, w, row);
    const OutputPixel* pixel = chunk.pixels + place;
    const int64_t channels = a.out_channels, from = (chunk.first + place) * channels + row;
    float* to = reinterpret_cast<float*>(chunk.answer) + from;
    const float* other = a.after.other == nullptr ? nullptr : chunk.other + from;
    Outside<1> outside;
    for (; tokens-- > 0; pixel++, sums += V::width, to += channels) {
      outside.move(at, pixel->inside);
      const auto added = other == nullptr ? V::all(-0.0f) : V::load(other, answers.rows);
      V::store(to, answers.answer(whole(at, ints(sums), pixel->sum, outside.of[0]), pixel->scale, added), answers.rows);
      if (other != nullptr) other += channels;
    }
  }
  // Codes of N vectors of outputs, whose sums are `stride` tokens apart. `Most`: of a code, 0 where it varies. What is read for
  // every token is held in locals.
  template <int Most, int N>
  TWOFOUR_NOINLINE void codes(const int32_t* sums, int64_t stride, int64_t tokens, int64_t place, int64_t row) const {
    const Vector at = vector_at(row);
    const int32_t most = Most > 0 ? Most : a.answer.most;
    const int64_t padded = plan.padded, step = plan.codes;
    const int32_t* numbers = a.answer.numbers + row;
    I held[(Most + 1) * N];
    TWOFOUR_UNROLL
    for (int i = 0; i < (Most + 1) * N; i++) held[i] = ints(numbers + i / N * padded + i % N * V::width);
    const OutputPixel* pixel = chunk.pixels + place;
    uint8_t* to = chunk.codes + place * step + row;
    Outside<N> outside;
    for (; tokens-- > 0; pixel++, sums += V::width, to += step) {
      outside.move(at, pixel->inside);
      typename V::ints code[N];
      TWOFOUR_UNROLL
      for (int n = 0; n < N; n++) {
        const I v = whole(at, ints(sums + n * stride * V::width), pixel->sum, outside.of[n]) ^ held[n];
        I one{};
        for (int32_t l = 1; l <= most; l++)
          one = reached(one, v, Most > 0 ? held[l * N + n] : ints(numbers + l * padded + n * V::width));
        code[n] = (typename V::ints)one;
      }
      if constexpr (N == 4) V::store_four(to, code);
      else V::store_bytes(to, code[0], at.rows);
    }
  }
  template <int N>
  void codes(const int32_t* sums, int64_t stride, int64_t tokens, int64_t place, int64_t row) const {
    if (a.answer.most == 3) codes<3, N>(sums, stride, tokens, place, row);
    else if (a.answer.most == 1) codes<1, N>(sums, stride, tokens, place, row);
    else codes<0, N>(sums, stride, tokens, place, row);
  }
  // Sums of a tile, [Vectors][stride tokens][V::width], of tokens from `place` of the chunk on and rows from `row` on.
  template <int Vectors>
  void tile(const int32_t* sums, int64_t stride, int64_t tokens, int64_t place, int64_t row) const {
    if constexpr (Vectors == 4 && V::width == 16)  // whose bytes are one store
      if (chunk.codes != nullptr && row + 64 <= a.out_channels) return codes<4>(sums, stride, tokens, place, row);
    for (int v = 0; v < Vectors && row < a.out_channels; v++, row += V::width, sums += stride * V::width)
      if (chunk.codes == nullptr) reals(sums, tokens, place, row);
      else codes<1>(sums, stride, tokens, place, row);
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

}  // namespace
