// The avx2 row.
#include "stripe_sums.h"

namespace twofour {

StripeKernel nm_stripes_any_f32__avx2() { return {subset_sums, stripe_rest, max_sums}; }

}  // namespace twofour
