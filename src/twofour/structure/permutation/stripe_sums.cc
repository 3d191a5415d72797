// The row, once for every instruction set.
#include "stripe_sums.h"

namespace twofour {

StripeKernel TWOFOUR_HERE(nm_stripes_any_f32)() { return {subset_sums, stripe_rest, max_sums}; }

}  // namespace twofour
