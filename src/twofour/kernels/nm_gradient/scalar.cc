#include "native/lanes_portable.h"

#include "rows.h"

namespace {

struct Vec : Lanes {
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  typedef uint32_t U __attribute__((vector_size(16)));
  typedef uint16_t H __attribute__((vector_size(8)));

  static TWOFOUR_INLINE U lanes() { return U{0, 1, 2, 3}; }
  static TWOFOUR_INLINE F evens(F a, F b) { return F{a[0], a[2], b[0], b[2]}; }
  static TWOFOUR_INLINE F odds(F a, F b) { return F{a[1], a[3], b[1], b[3]}; }
  static TWOFOUR_INLINE F lows(F a, F b) { return F{a[0], b[0], a[1], b[1]}; }
  static TWOFOUR_INLINE F highs(F a, F b) { return F{a[2], b[2], a[3], b[3]}; }
  static TWOFOUR_INLINE uint64_t nibbles(U codes) {
    return codes[0] | codes[1] << 4 | codes[2] << 8 | codes[3] << 12;
  }
};

}  // namespace

namespace twofour {

void nm_gradient_2x4__scalar(const NmGradient& a) { prune_gradient<Vec>(a); }

}  // namespace twofour
