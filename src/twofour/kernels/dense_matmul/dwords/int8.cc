// The int8 rows, for each instruction set of dense_matmul.inc.
#include "panels.h"

namespace twofour {

int64_t TWOFOUR_WORKSPACE_HERE(dense_matmul_int8_panels)(const Matmul& a) { return dword_panels_workspace<ByteDots>(a); }
void TWOFOUR_HERE(dense_matmul_int8_panels)(const Matmul& a) { dword_panels<ByteDots>(a); }

// Rows of window_conv/window_conv.inc: the same loops on other tokens.
int64_t TWOFOUR_WORKSPACE_HERE(window_conv_int8)(const WindowConv& c) {
  return dword_panels_workspace<ByteDots>(c.product, &c.windows);
}
void TWOFOUR_HERE(window_conv_int8)(const WindowConv& c) { dword_panels<ByteDots>(c.product, &c.windows); }

}  // namespace twofour
