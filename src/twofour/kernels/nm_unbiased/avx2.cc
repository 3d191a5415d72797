#include "native/lanes_avx2.h"

#include "estimate.h"

namespace {

struct Vec : Lanes {
  typedef float F __attribute__((vector_size(32)));
  typedef int32_t I __attribute__((vector_size(32)));
  typedef uint32_t U __attribute__((vector_size(32)));
  typedef uint16_t H __attribute__((vector_size(16)));

  static TWOFOUR_INLINE U lanes() { return U{0, 1, 2, 3, 4, 5, 6, 7}; }
};

}  // namespace

namespace twofour {

void nm_unbiased_2x4__avx2(const NmUnbiased& a) { estimate<Vec>(a); }

}  // namespace twofour
