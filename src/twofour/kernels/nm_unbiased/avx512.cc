#include "native/lanes_avx512.h"

#include "estimate.h"

namespace {

struct Vec : Lanes {
  typedef float F __attribute__((vector_size(64)));
  typedef int32_t I __attribute__((vector_size(64)));
  typedef uint32_t U __attribute__((vector_size(64)));
  typedef uint16_t H __attribute__((vector_size(32)));

  static TWOFOUR_INLINE U lanes() { return U{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
};

}  // namespace

namespace twofour {

void nm_unbiased_2x4__avx512(const NmUnbiased& a) { estimate<Vec>(a); }

}  // namespace twofour
