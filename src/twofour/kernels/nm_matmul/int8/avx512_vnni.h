// The AVX-512 vector type of the int8 products. Included once per instruction-set file; internal linkage.
#pragma once

#include <cstdint>

#include "octet_lanes.h"

namespace {

struct Vec : OctetLanes {
  static TWOFOUR_INLINE void store_x(ints q, uint8_t* to, int64_t k, int64_t stride) {
    const __m128i bytes = _mm512_cvtepi32_epi8(q);
    uint8_t* at = to + k / 8 * stride;
    _mm_storel_epi64(reinterpret_cast<__m128i*>(at), bytes);
    _mm_storeh_pd(reinterpret_cast<double*>(at + stride), _mm_castsi128_pd(bytes));
  }
  static TWOFOUR_INLINE void store_bytes(uint8_t* p, ints v, int64_t count) {
    _mm512_mask_cvtepi32_storeu_epi8(p, mask(count), v);
  }

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
