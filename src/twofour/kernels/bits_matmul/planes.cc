// The rows that count bits, for each instruction set of bits_matmul.inc.
#include "planes.h"

#include "bits_matmul.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(bits_matmul_planes)(const Matmul& a) { return planes_workspace<PlaneCounts>(a); }
void TWOFOUR_HERE(bits_matmul_planes)(const Matmul& a) { planes_product<PlaneCounts>(a); }

}  // namespace twofour
