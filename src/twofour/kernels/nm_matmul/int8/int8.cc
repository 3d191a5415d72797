// The rows on what every x86 has, for each instruction set of nm_matmul.inc.
#include "kernels/nm_matmul/nm_matmul.h"
#include "kernels/octet_lanes.h"
#include "row_octets.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(nm_matmul_2x4_int8_rows)(const Matmul& a) { return row_octets_workspace<OctetLanes>(a); }
void TWOFOUR_HERE(nm_matmul_2x4_int8_rows)(const Matmul& a) { row_octets<OctetLanes>(a); }
#if defined(TWOFOUR_SET_avx2)
int64_t TWOFOUR_WORKSPACE_HERE(nm_matmul_2x4_int8_rows_stream)(const Matmul& a) {
  return row_octets_workspace<OctetLanes>(a);
}
void TWOFOUR_HERE(nm_matmul_2x4_int8_rows_stream)(const Matmul& a) { row_octets<OctetLanes, FetchNone>(a); }
#endif

// Rows of window_conv/window_conv.inc: the same loops on other tokens.
int64_t TWOFOUR_WORKSPACE_HERE(window_conv_2x4_int8)(const WindowConv& c) {
  return row_octets_workspace<OctetLanes>(c.product, &c.windows);
}
void TWOFOUR_HERE(window_conv_2x4_int8)(const WindowConv& c) { row_octets<OctetLanes>(c.product, &c.windows); }

}  // namespace twofour
