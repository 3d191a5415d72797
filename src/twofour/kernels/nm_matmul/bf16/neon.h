// Floats of NEON whose upper halves are bfloat16, for the rows with and without the instructions for bfloat16.
#pragma once

#include <cstring>

#include "native/lanes_neon.h"

namespace {

struct Vec : Lanes {
  static constexpr int panel_sums = 16;
  static constexpr int row_halves = 1, row_tokens = 4, row_sums = 16;

  // bfloat16 in memory as the upper halves of floats, and back.
  static reg load_upper(const char* p) {
    uint16x4_t words;
    std::memcpy(&words, p, 8);
    return vreinterpretq_f32_u32(vshll_n_u16(words, 16));
  }
  static reg load_upper_partial(const char* p, int64_t count) {
    alignas(8) char words[8] = {};
    std::memcpy(words, p, static_cast<size_t>(2 * count));
    return load_upper(words);
  }
  static void store_upper(char* p, reg v) { store_upper_partial(p, v, 4); }
  static void store_upper_partial(char* p, reg v, int64_t count) {
    const uint16x4_t words = vshrn_n_u32(vreinterpretq_u32_f32(v), 16);
    std::memcpy(p, &words, static_cast<size_t>(2 * count));
  }

  // Dwords that hold two bfloat16 each, as two vectors of floats.
  static reg lower(ireg v) { return vreinterpretq_f32_u32(vshlq_n_u32(v, 16)); }
  static reg upper(ireg v) { return vreinterpretq_f32_u32(vandq_u32(v, vdupq_n_u32(0xffff0000u))); }
  static TWOFOUR_INLINE void broadcast_pair(const char* p, reg (&w)[2]) {
    uint32_t both;
    std::memcpy(&both, p, 4);
    w[0] = lower(vdupq_n_u32(both));
    w[1] = upper(vdupq_n_u32(both));
  }
};

}  // namespace
