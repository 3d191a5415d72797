// Gradients of attention: the call, and its kernels.
#pragma once

#include "attention.h"

namespace twofour {

// One call. `of` is what was computed, without an answer: key_heads == heads, no added keys, no order of rows. upstream
// (batch, heads, queries, value_width) is its answer's gradient; dq, dk and dv are of the shapes of q, k and v. All are of
// the kernel's type, their last axes contiguous.
struct AttentionGradient {
  Attention of;
  const void* upstream;
  Strides upstream_strides;
  void *dq, *dk, *dv;
  Strides dq_strides, dk_strides, dv_strides;
};

// One row of the table, as AttentionKernel's.
struct AttentionGradientKernel : RowBase {
  int64_t (*workspace_bytes)(const AttentionGradient&);
  void (*run)(const AttentionGradient&, int64_t begin, int64_t end, void* workspace);
};

#define TWOFOUR_ROW(symbol, ...)                              \
  int64_t symbol##__workspace(const AttentionGradient& args); \
  void symbol(const AttentionGradient& args, int64_t begin, int64_t end, void* workspace);
#include "gradient.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
