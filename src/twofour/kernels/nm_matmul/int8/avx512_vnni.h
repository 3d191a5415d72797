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
};

}  // namespace
