// What the vectors of every int8 product are: floats, and whole numbers of 32 bits. Internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "native/simd.h"

namespace {

struct OctetLanes : Lanes {
  using ints = ireg;

  static ints load_ints(const void* p) { return load_index(p); }
  static void store_ints(int32_t* p, ints v) { std::memcpy(p, &v, sizeof v); }
  // Unsigned: sums of weights and zero points come from bytes that anybody may have written, and may wrap around.
  static ints add(ints a, ints b) { return (ints)((U)a + (U)b); }
  static ints minus_product(ints a, ints b, int32_t c) { return (ints)((U)a - (U)b * static_cast<uint32_t>(c)); }
  static reg to_real(ints v) { return __builtin_convertvector((I)v, reg); }
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
