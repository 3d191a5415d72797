// The portable row: 128-bit vectors as GCC and clang write them, lowered to SSE2, NEON or plain scalar code.
#include "kernels/nm_matmul/nm_matmul.h"
#include "portable.h"

namespace twofour {

int64_t nm_matmul_2x4_int8_rows__scalar__workspace(const Matmul& a) { return row_octets_workspace<Portable>(a); }
void nm_matmul_2x4_int8_rows__scalar(const Matmul& a) { row_octets<Portable>(a); }

}  // namespace twofour
