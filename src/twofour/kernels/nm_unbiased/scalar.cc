#include "native/lanes_portable.h"

#include "estimate.h"

namespace {

struct Vec : Lanes {
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  typedef uint32_t U __attribute__((vector_size(16)));
  typedef uint16_t H __attribute__((vector_size(8)));

  static TWOFOUR_INLINE U lanes() { return U{0, 1, 2, 3}; }
};

}  // namespace

namespace twofour {

void nm_unbiased_2x4__scalar(const NmUnbiased& a) { estimate<Vec>(a); }

}  // namespace twofour
