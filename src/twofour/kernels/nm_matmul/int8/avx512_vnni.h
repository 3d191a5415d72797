// The AVX-512 vector type of the int8 products. Included once per instruction-set file; internal linkage.
#pragma once

#include <cstdint>

#include "kernels/whole_lanes.h"

namespace {

struct Vec : WholeLanes {
  struct Octet {
    ints values, control;
  };
  // vpermb reads 6 bits of a control byte; the eight inputs repeat, so 3 of them count: the index, and in the upper
  // half of a dword the second group.
  static TWOFOUR_INLINE Octet octet(const uint8_t* p, ints meta) {
    return {_mm512_load_si512(p),
            _mm512_ternarylogic_epi32(meta, _mm512_set1_epi8(3), _mm512_set1_epi32(0x04040000), 0xea)};
  }
  static TWOFOUR_INLINE ints broadcast8(const uint8_t* p) {
    return _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static TWOFOUR_INLINE ints dot(ints sum, ints x, const Octet& w) {
    return _mm512_dpbusd_epi32(sum, _mm512_permutexvar_epi8(w.control, x), w.values);
  }
  // Eight octets of each of eight tokens, `stride` bytes apart, to [octet][token][8].
  static TWOFOUR_INLINE void turn_octets(const uint8_t* from, int64_t stride, uint8_t* to) {
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
        _mm512_storeu_si512(to + (2 * i + odd) * 64, _mm512_shuffle_i64x2(a, b, 0x88));
        _mm512_storeu_si512(to + (2 * i + odd + 4) * 64, _mm512_shuffle_i64x2(a, b, 0xdd));
      }
    }
  }
};

}  // namespace
