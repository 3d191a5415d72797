// The rows whose weight has a scale for each group of inputs, for each instruction set of bits_matmul.inc.
#include "groups.h"

#include "bits_matmul.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(bits_matmul_groups)(const Matmul& a) { return GroupPlan<ByteDots>(a).bytes(); }
void TWOFOUR_HERE(bits_matmul_groups)(const Matmul& a) { group_product<ByteDots>(a); }

}  // namespace twofour
