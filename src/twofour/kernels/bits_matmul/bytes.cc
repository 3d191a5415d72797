// The rows that multiply bytes, for each instruction set of bits_matmul.inc.
#include "bytes.h"

#include "bits_matmul.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(bits_matmul_bytes)(const Matmul& a) { return bytes_plan<ByteDots>(a).bytes(); }
void TWOFOUR_HERE(bits_matmul_bytes)(const Matmul& a) { bytes_product<ByteDots, false>(a); }

int64_t TWOFOUR_WORKSPACE_HERE(bits_matmul_packed)(const Matmul& a) { return bytes_plan<ByteDots>(a).bytes(); }
void TWOFOUR_HERE(bits_matmul_packed)(const Matmul& a) { bytes_product<ByteDots, true>(a); }

}  // namespace twofour
