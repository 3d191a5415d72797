// The rows of 2:4 weights, for each instruction set of bits_matmul.inc.
#include "kept.h"

#include "bits_matmul.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(bits_matmul_2x4_bytes)(const Matmul& a) { return kept_plan<KeptBytes>(a).bytes(); }
void TWOFOUR_HERE(bits_matmul_2x4_bytes)(const Matmul& a) { kept_product<KeptBytes>(a); }

int64_t TWOFOUR_WORKSPACE_HERE(bits_matmul_2x4_packed)(const Matmul& a) { return kept_plan<KeptHalves>(a).bytes(); }
void TWOFOUR_HERE(bits_matmul_2x4_packed)(const Matmul& a) { kept_product<KeptHalves>(a); }

}  // namespace twofour
