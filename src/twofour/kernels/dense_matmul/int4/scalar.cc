// The portable row of the dense int4 weight, with float activations.
#include "kernels/dense_matmul/dense_matmul.h"
#include "kernels/nm_matmul/int4/float_rows.h"

namespace {

struct Vec {
  typedef float reg __attribute__((vector_size(16)));
  static constexpr int width = 4, tokens = 4;
};

}  // namespace

namespace twofour {

int64_t dense_matmul_int4_rows__scalar__workspace(const DenseMatmul& a) { return Int4Floats<Vec, true>::workspace(a); }
void dense_matmul_int4_rows__scalar(const DenseMatmul& a) { Int4Floats<Vec, true>::run(a); }

}  // namespace twofour
