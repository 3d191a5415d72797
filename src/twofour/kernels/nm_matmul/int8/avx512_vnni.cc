// The AVX-512 VNNI row: VBMI permutes the activations, vpdpbusd multiplies.
#include "kernels/nm_matmul/nm_matmul.h"
#include "avx512_vnni.h"
#include "row_octets.h"

namespace twofour {

int64_t nm_matmul_2x4_int8_rows__avx512_vnni__workspace(const Matmul& a) { return row_octets_workspace<Vec>(a); }
void nm_matmul_2x4_int8_rows__avx512_vnni(const Matmul& a) { row_octets<Vec>(a); }

}  // namespace twofour
