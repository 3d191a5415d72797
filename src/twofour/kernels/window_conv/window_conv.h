// y = activation(conv(x, W) + bias + other) in whole numbers: the table of kernels. They are functions of products of bytes,
// in whose files they stand.
#pragma once

#include <cstdint>

#include "kernels/windows.h"
#include "native/table.h"

namespace twofour {

// One row of the table; both functions run the row's instructions: ask the CPU first.
struct WindowConvKernel : RowBase {
  int64_t (*workspace_bytes)(const WindowConv&);
  void (*run)(const WindowConv&);
};

#define TWOFOUR_ROW(symbol, ...)                       \
  int64_t symbol##__workspace(const WindowConv& call); \
  void symbol(const WindowConv& call);
#include "window_conv.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
