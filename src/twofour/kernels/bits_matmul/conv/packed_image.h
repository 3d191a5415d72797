// An image becomes codes with zeros around them, the sums of its pixels' codes, and marks of what is lost to NaN.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "../planes.h"
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

inline int32_t sum_of_pixel(const PixelCodes& form, int64_t bytes, const char* codes) {
  if (!form.planes) return sum_of_bytes(reinterpret_cast<const uint8_t*>(codes), bytes);
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
  const bool whole = plan.in.planes ? channels % 64 == 0 : channels == plan.pixel;
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
TWOFOUR_NOINLINE void pack_row(const ReadConv& read, const ConvPlan& plan, int64_t n, int64_t r, ImageFacts* facts, uint8_t* staged) {
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
      const int64_t stood = plan.in.bytes(), together = stood == plan.pixel ? run : 1;
      for (int64_t i = 0; i < run; i += together)
        std::memcpy(to + (j + i) * plan.pixel, from + (at + i) * stood, static_cast<size_t>(together * plan.pixel));
      if (facts->lost != 0) std::memcpy(lost + j, from + read.pixels() * stood + at, static_cast<size_t>(run));
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
    sums[j] = begin <= j && j < end ? sum_of_pixel(plan.in, plan.pixel, to + j * plan.pixel) : 0;
}

}  // namespace
