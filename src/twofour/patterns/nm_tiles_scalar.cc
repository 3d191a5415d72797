// Four tiles at once in vectors as GCC and clang write them, lowered to SSE2, NEON or plain scalar code.
#include "nm_tiles_search.h"

namespace {

struct Vec {
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  static constexpr int width = 4;

  // Vector t holds the four columns of tile t: afterwards vector c holds column c of every tile.
  static TWOFOUR_INLINE void split(F (&x)[4]) {
    const F a = x[0], b = x[1], c = x[2], d = x[3];
    TWOFOUR_UNROLL
    for (int i = 0; i < 4; i++) x[i] = F{a[i], b[i], c[i], d[i]};
  }
  static TWOFOUR_INLINE I in_order(I mask) { return mask; }
};

}  // namespace

namespace twofour {

bool nm_tiles_2x4_f32__scalar(const NmTiles& a) { return search<Vec>(a); }

}  // namespace twofour
