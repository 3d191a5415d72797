// Byte weights whose inputs stand apart: the bytes of a token that strips keep, brought side by side, so that the product
// reads dwords of them as it reads runs. Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "blocks.h"
#include "native/compiler.h"
#include "native/simd.h"

namespace twofour {

// Strips whose layout is windowed (blocks.h).
struct WindowedStrips {
  const uint32_t* starts;
  const uint8_t *counts, *places;
  int64_t windows, counted;
};

// What strips [strip, strip + n) keep of the token x -> to[n][stride], each with kZerosBehind zeros behind it.
using Keep = void(const WindowedStrips& b, int64_t strip, const char* x, char* to, int64_t stride);

// Of one, two and four strips together. A set whose permutations alone are better brings its own to the rows of another.
struct Keepers {
  Keep *one, *two, *four;
};

struct Matmul;
void block_int8_rows(const Matmul& a, const Keepers& keepers);  // block_matmul_int8_rows__avx512_vnni with these

}  // namespace twofour

namespace {

using twofour::Keepers;
using twofour::kWindow;
using twofour::WindowedStrips;

constexpr int kZerosBehind = 64;    // bytes of zeros behind what a strip keeps
constexpr int kStripsTogether = 4;  // strips for which a window of the token is loaded once, at most

// Bytes of what is brought together for one strip: whole vectors, and what stores of whole vectors write behind them.
inline int64_t kept_bytes_of(const BlockShape& shape) { return shape.windows * kWindow + 4 * 64; }

#if defined(TWOFOUR_SET_avx512_vnni)
// The bytes of the window (low, high) at 64 places.
TWOFOUR_INLINE __m512i found_bytes(__m512i low, __m512i high, __m512i places) {
#if defined(TWOFOUR_SET_avx512_vbmi)
  return _mm512_permutex2var_epi8(low, places, high);
#else
  // Words that hold them, of even places and of odd ones, each byte moved to where it belongs: a place's lowest bit says
  // in which half of its word it stands.
  const __m512i eight = _mm512_set1_epi16(8);
  const __m512i even = _mm512_permutex2var_epi16(low, _mm512_srli_epi16(places, 1), high);
  const __m512i odd = _mm512_permutex2var_epi16(low, _mm512_srli_epi16(places, 9), high);
  const __m512i down = _mm512_and_si512(_mm512_slli_epi16(places, 3), eight);
  const __m512i up = _mm512_andnot_si512(_mm512_srli_epi16(places, 5), eight);
  return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, _mm512_srlv_epi16(even, down), _mm512_sllv_epi16(odd, up));
#endif
}

// The bytes of the window (low, high) at `count` <= 128 places -> to. Stores write 32 bytes, or 96 where a window is
// expected to keep many (`many`), and the rest of 128 where there are more: a branch on a count near 64 is foretold by nothing.
template <bool many>
TWOFOUR_INLINE void keep_window(__m512i low, __m512i high, const uint8_t* places, int64_t count, char* to) {
  const auto at = [&](int64_t i) __attribute__((always_inline)) {
    return found_bytes(low, high, _mm512_loadu_si512(places + i));
  };
  const auto few = [&](int64_t i) __attribute__((always_inline)) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(places + i));
    const __m512i found = found_bytes(low, high, _mm512_castsi256_si512(half));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm512_castsi512_si256(found));
  };
  if constexpr (many) {
    _mm512_storeu_si512(to, at(0));
    few(64);
    if (__builtin_expect(count > 96, 0)) few(96);
  } else {
    few(0);
    if (__builtin_expect(count > 32, 0)) {
      few(32);
      _mm512_storeu_si512(to + 64, at(64));
    }
  }
}

template <int strips, bool many>
TWOFOUR_NOINLINE void keep_strips(const WindowedStrips& b, int64_t strip, const char* x, char* to, int64_t stride) {
  const int64_t windows = b.windows;
  const uint8_t* places[strips];
  char* at[strips];
  TWOFOUR_UNROLL
  for (int j = 0; j < strips; j++) places[j] = b.places + b.starts[strip + j], at[j] = to + j * stride;
  const int64_t counted = b.counted;
  const uint8_t* counts = b.counts + strip * counted;
  for (int64_t w = 0; w < windows; w++, x += kWindow) {
    const __m512i low = _mm512_loadu_si512(x), high = _mm512_loadu_si512(x + 64);
    TWOFOUR_UNROLL
    for (int j = 0; j < strips; j++) {
      const int64_t count = counts[j * counted + w];
      keep_window<many>(low, high, places[j], count, at[j]);
      places[j] += count, at[j] += count;
    }
  }
  TWOFOUR_UNROLL
  for (int j = 0; j < strips; j++) _mm512_storeu_si512(at[j], _mm512_setzero_si512());
}

template <int strips>
void keep(const WindowedStrips& b, int64_t strip, const char* x, char* to, int64_t stride) {
  const int64_t kept = b.starts[strip + strips] - b.starts[strip];
  if (kept > 24 * strips * b.windows) keep_strips<strips, true>(b, strip, x, to, stride);
  else keep_strips<strips, false>(b, strip, x, to, stride);
}
#else
template <int strips>
void keep(const WindowedStrips& b, int64_t strip, const char* x, char* to, int64_t stride) {
  const int64_t windows = b.windows;
  for (int j = 0; j < strips; j++) {
    const uint8_t* place = b.places + b.starts[strip + j];
    char* at = to + j * stride;
    for (int64_t w = 0; w < windows; w++)
      for (int left = b.counts[(strip + j) * b.counted + w]; left > 0; left--) *at++ = x[w * kWindow + *place++ % kWindow];
    std::memset(at, 0, kZerosBehind);
  }
}
#endif

constexpr Keepers kKeepers = {keep<1>, keep<2>, keep<4>};  // of this set

// What a unit keeps of `tokens` tokens -> to[token][strip].
template <int S>
inline void keep_unit(const Blocks& b, const Keepers& keepers, int64_t unit, const char* x, int64_t stride, int64_t tokens, char* to) {
  constexpr int strips = kBlockUnit / S, together = strips < kStripsTogether ? strips : kStripsTogether;
  const int64_t each = kept_bytes_of(b.shape);
  const WindowedStrips windowed = {b.starts, b.counts, b.places, b.shape.windows, b.shape.counted};
  const auto keep = together == 4 ? keepers.four : together == 2 ? keepers.two : keepers.one;
  for (int64_t t = 0; t < tokens; t++)
    for (int j = 0; j < strips; j += together, to += together * each) keep(windowed, unit * strips + j, x + t * stride, to, each);
}

// Numbers of the inputs that a strip keeps, filled up by that of zeros -> to.
inline void inputs_of(const Blocks& b, int64_t strip, uint16_t* to) {
  const int64_t windows = b.shape.windows, all = b.starts[strip + 1] - b.starts[strip];
  const uint8_t* place = b.places + b.starts[strip];
  int64_t i = 0;
  for (int64_t w = 0; w < windows; w++) {
    const int64_t count = b.counts[strip * b.shape.counted + w];
    for (int64_t k = 0; k < count; k++) to[i + k] = static_cast<uint16_t>(w * kWindow + place[i + k] % kWindow);
    i += count;
  }
  for (; i < all; i++) to[i] = static_cast<uint16_t>(b.shape.zero);
}

}  // namespace
