// The first half of a vector, for tails of which the other half would be padding: a core that computes 64 bytes in two
// steps of 32 (Zen 4) takes half the time for it. Included once per instruction set; internal linkage.
#pragma once

#include <cstdint>

#include "native/simd.h"

namespace {

// Other sets have none: a half of their vectors takes as long.
template <class V>
struct HalfOf {
  using reg = typename V::reg;
  static constexpr int width = 0;
};

#if defined(TWOFOUR_SET_avx512)
template <>
struct HalfOf<Lanes> {
  using reg = __m256;
  static constexpr int width = Lanes::width / 2;

  static TWOFOUR_INLINE reg zero() { return _mm256_setzero_ps(); }
  static TWOFOUR_INLINE reg lower(Lanes::reg v) { return _mm512_castps512_ps256(v); }
  static TWOFOUR_INLINE reg load(const float* p) { return _mm256_load_ps(p); }
  static TWOFOUR_INLINE reg load_shared(const float* p) {  // a load that stays one, as that of Lanes
    reg v = load(p);
    asm("" : "+v"(v));
    return v;
  }
  static TWOFOUR_INLINE void store(float* p, reg v) { _mm256_store_ps(p, v); }
  static TWOFOUR_INLINE reg fma(reg w, reg x, reg sum) { return _mm256_fmadd_ps(w, x, sum); }
};
#endif

}  // namespace
