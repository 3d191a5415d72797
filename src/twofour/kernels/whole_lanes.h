// What the vectors of every int8 product are: floats, and whole numbers of 32 bits, of which bytes leave. Internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "native/simd.h"

namespace {

struct WholeLanes : Lanes {
  using ints = ireg;

  static ints load_ints(const void* p) { return load_index(p); }
  static void store_ints(int32_t* p, ints v) { std::memcpy(p, &v, sizeof v); }
  // Unsigned: sums of weights and zero points come from bytes that anybody may have written, and may wrap around.
  static ints add(ints a, ints b) { return (ints)((U)a + (U)b); }
  static ints minus_product(ints a, ints b, int32_t c) { return (ints)((U)a - (U)b * static_cast<uint32_t>(c)); }
  static reg to_real(ints v) { return __builtin_convertvector((I)v, reg); }

  // The low bytes of the first `count` lanes.
  static TWOFOUR_INLINE void store_bytes(uint8_t* p, ints v, int64_t count) {
#if defined(TWOFOUR_SET_avx512)
    _mm512_mask_cvtepi32_storeu_epi8(p, mask(count), v);
#elif defined(TWOFOUR_SET_avx2)
    const int64_t bytes = low_bytes(v);
    std::memcpy(p, &bytes, static_cast<size_t>(count));
#else
    for (int64_t i = 0; i < count; i++) p[i] = static_cast<uint8_t>(v[i]);
#endif
  }
  // The low bytes of all lanes, those of inputs from k on, where 8 inputs stand every `stride` bytes.
  static TWOFOUR_INLINE void store_x(ints q, uint8_t* to, int64_t k, int64_t stride) {
#if defined(TWOFOUR_SET_avx512)
    const __m128i bytes = _mm512_cvtepi32_epi8(q);
    uint8_t* at = to + k / 8 * stride;
    _mm_storel_epi64(reinterpret_cast<__m128i*>(at), bytes);
    const int64_t high = bytes[1];  // not _mm_storeh_pd, whose address must be a double's
    std::memcpy(at + stride, &high, 8);
#elif defined(TWOFOUR_SET_avx2)
    const int64_t bytes = low_bytes(q);
    std::memcpy(to + k / 8 * stride, &bytes, 8);
#else
    store_bytes(to + k / 8 * stride + k % 8, q, width);
#endif
  }
  // Four vectors of whole numbers from 0 to 255 as bytes, in order.
  static TWOFOUR_INLINE void store_four(uint8_t* to, const ints (&v)[4]) {
#if defined(TWOFOUR_SET_avx512)
    const ints words = _mm512_packus_epi32(v[0], v[1]), more = _mm512_packus_epi32(v[2], v[3]);
    const ints order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(words, more)));
#else
    for (int i = 0; i < 4; i++) store_x(v[i], to, i * width, 8);
#endif
  }
#if defined(TWOFOUR_SET_avx2) && !defined(TWOFOUR_SET_avx512)
  static TWOFOUR_INLINE int64_t low_bytes(ints v) {
    const ints low = _mm256_shuffle_epi8(v, _mm256_set1_epi32(0x0c080400));
    const __m128i two = _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    return _mm_cvtsi128_si64(two);
  }
#endif
  static ints next_index(ints meta) { return shift_right<2>(meta); }  // the bits that come in above are never read
};

// clamp(nearest even(v * factor) + zero, low, high); a NaN becomes `low`.
template <class V>
struct Rounder {
  typename V::reg factor, least, most;
  typename V::ints zero;

  TWOFOUR_INLINE Rounder(float f, int32_t z, int low, int high)
      : factor(V::all(f)), least(V::all(static_cast<float>(low) - static_cast<float>(z))),
        most(V::all(static_cast<float>(high) - static_cast<float>(z))),
        zero((typename V::ints)(typename V::I{} + z)) {}
  TWOFOUR_INLINE typename V::ints operator()(typename V::reg v) const {
    return V::add(V::to_ints(V::min(V::max(v * factor, least), most)), zero);
  }
};

}  // namespace
