// The scalar row.
#include "stripe_sums.h"

namespace twofour {

StripeKernel nm_stripes_any_f32__scalar() { return {subset_sums, stripe_rest, max_sums}; }

}  // namespace twofour
