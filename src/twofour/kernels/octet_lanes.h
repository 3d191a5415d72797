// Eight inputs, two groups of four, against the four values that a lane keeps of them: a permutation in the register, then
// dots of bytes. Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>

#include "kernels/byte_dots.h"
#include "kernels/whole_lanes.h"

namespace {

// Of every set: `Octet`, the values of each lane and where they stand, octet(values, indices), a byte of two bits for each
// value, broadcast8(inputs) and dot(sum, inputs, octet), inputs unsigned and values with a sign.
#if defined(TWOFOUR_SET_avx512_vnni)
struct OctetLanes : WholeLanes {
  struct Octet {
    ints values, control;
  };
  // vpshufb reads 4 bits of a control byte inside each quarter of a vector, where the eight inputs stand twice: the index,
  // and in the upper half of a dword the second group.
  static TWOFOUR_INLINE Octet octet(ints values, ints indices) {
    return {values, _mm512_ternarylogic_epi32(indices, _mm512_set1_epi8(3), _mm512_set1_epi32(0x04040000), 0xea)};
  }
  static TWOFOUR_INLINE ints broadcast8(const uint8_t* p) {
    return _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static TWOFOUR_INLINE ints dot(ints sum, ints x, const Octet& w) {
    TWOFOUR_VNNI("vpdpbusd", sum, _mm512_shuffle_epi8(x, w.control), w.values);
    return sum;
  }
  // Eight octets of each of eight tokens, `stride` bytes apart, to [octet][token][8], octets `apart` bytes apart.
  static TWOFOUR_INLINE void turn_octets(const uint8_t* from, int64_t stride, uint8_t* to, int64_t apart) {
    ints two[8], four[8];  // of two tokens every second octet, of four tokens every fourth
    TWOFOUR_UNROLL
    for (int t = 0; t < 8; t += 2) {
      const ints a = _mm512_loadu_si512(from + t * stride), b = _mm512_loadu_si512(from + (t + 1) * stride);
      two[t / 2] = _mm512_unpacklo_epi64(a, b);
      two[t / 2 + 4] = _mm512_unpackhi_epi64(a, b);
    }
    TWOFOUR_UNROLL
    for (int i = 0; i < 8; i += 2) {
      four[i] = _mm512_shuffle_i64x2(two[i], two[i + 1], 0x88);
      four[i + 1] = _mm512_shuffle_i64x2(two[i], two[i + 1], 0xdd);
    }
    TWOFOUR_UNROLL
    for (int odd = 0; odd < 2; odd++) {
      TWOFOUR_UNROLL
      for (int i = 0; i < 2; i++) {
        const ints a = four[4 * odd + i], b = four[4 * odd + i + 2];
        _mm512_storeu_si512(to + (2 * i + odd) * apart, _mm512_shuffle_i64x2(a, b, 0x88));
        _mm512_storeu_si512(to + (2 * i + odd + 4) * apart, _mm512_shuffle_i64x2(a, b, 0xdd));
      }
    }
  }
};
#elif defined(TWOFOUR_SET_avx_vnni)
// vpshufb reads 4 bits of a control byte inside each half of a vector, where the eight inputs stand twice.
struct OctetLanes : WholeLanes {
  struct Octet {
    ints values, control;
  };
  static TWOFOUR_INLINE Octet octet(ints values, ints indices) {
    const ints low = _mm256_and_si256(indices, _mm256_set1_epi8(3));
    return {values, _mm256_or_si256(low, _mm256_set1_epi32(0x04040000))};
  }
  static TWOFOUR_INLINE ints broadcast8(const uint8_t* p) {
    return _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static TWOFOUR_INLINE ints dot(ints sum, ints x, const Octet& w) {
    TWOFOUR_VNNI("vpdpbusd", sum, _mm256_shuffle_epi8(x, w.control), w.values);
    return sum;
  }
};
#elif defined(TWOFOUR_SET_avx2)
// vpmaddubsw would saturate (255 * 127 * 2 > 32767), so inputs and values are widened to 16 bits: the permute that picks
// the inputs writes the zeros between them, at no cost.
struct OctetLanes : WholeLanes {
  // 16-bit words: the first and the second value of each group. A control byte of 0x80 writes a zero.
  struct Octet {
    ints first, second, pick_first, pick_second;
  };
  static TWOFOUR_INLINE Octet octet(ints values, ints indices) {
    const ints low = _mm256_set1_epi32(0x00030003), base = _mm256_set1_epi32(static_cast<int>(0x80048000u));
    return {_mm256_srai_epi16(_mm256_slli_epi16(values, 8), 8), _mm256_srai_epi16(values, 8),
            _mm256_or_si256(_mm256_and_si256(indices, low), base),
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(indices, 8), low), base)};
  }
  static TWOFOUR_INLINE ints broadcast8(const uint8_t* p) {
    return _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static TWOFOUR_INLINE ints dot(ints sum, ints x, const Octet& w) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(x, w.pick_first), w.first));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(x, w.pick_second), w.second));
  }
};
#else
// 128-bit vectors as GCC and clang write them, lowered to SSE2, NEON or plain scalar code.
struct OctetLanes : WholeLanes {
  struct Octet {
    ints values, indices;
  };
  static Octet octet(ints values, ints indices) { return {values, indices}; }
  static const uint8_t* broadcast8(const uint8_t* p) { return p; }
  // Called, not inlined: unrolled into every caller a file took a minute and 560 MB to compile.
  TWOFOUR_NOINLINE static ints dot(ints sum, const uint8_t* x, const Octet& w) {
    for (int r = 0; r < width; r++) {
      const uint32_t v = w.values[r], m = w.indices[r];
      const auto value = [&](int b) { return static_cast<int8_t>(v >> 8 * b); };
      sum[r] += static_cast<uint32_t>(value(0) * x[m & 3] + value(1) * x[m >> 8 & 3] + value(2) * x[4 + (m >> 16 & 3)] +
                                      value(3) * x[4 + (m >> 24 & 3)]);
    }
    return sum;
  }
};
#endif

}  // namespace
