// The portable row.
#include "float_rows.h"

namespace {

struct Vec {
  typedef float reg __attribute__((vector_size(16)));
  static constexpr int width = 4, tokens = 4;

  static reg broadcast4(const float* p) {
    reg v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  template <class I>
  static reg permute4(reg x, I i) {
    return reg{x[i[0] & 3], x[i[1] & 3], x[i[2] & 3], x[i[3] & 3]};
  }
};

}  // namespace

namespace twofour {

int64_t nm_matmul_2x4_int4_rows__scalar__workspace(const NmMatmul& a) { return Int4Floats<Vec>::workspace(a); }
void nm_matmul_2x4_int4_rows__scalar(const NmMatmul& a) { Int4Floats<Vec>::run(a); }

}  // namespace twofour
