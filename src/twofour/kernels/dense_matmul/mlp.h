// Two products in a row, y = last(activation(first(x)) [* gate(x)]), by strips of tokens: what is between them never exists
// whole. A strip's rows stay in a cache where all tokens' would not; weights are read once for each strip.
#pragma once

#include <algorithm>

#include "dense_matmul.h"
#include "kernels/row_norm.h"
#include "native/integers.h"
#include "native/scratch.h"

namespace twofour {

constexpr int64_t kStripBytes = 1 << 20;  // of what is between the products: an L2
constexpr int64_t kStripTokens = 64;      // at least, for each thread: a strip reads the weights from memory once more

// Tensors and epilogues of whole calls; what `first` and `gate` write, and `last` reads, is set for each strip.
struct Mlp {
  Matmul first, gate, last;
  bool gated;
  const NormKernel *before, *after;  // of rows of x, and of rows of y, or null
  Norm before_rows, after_rows;      // their x and y are those of all tokens; `before_rows.y` is set for each strip

  int64_t hidden() const { return first.out_features; }
  int64_t strips() const {
    const int64_t row = hidden() * 4 * (gated ? 2 : 1);
    const int64_t most = std::max(kStripTokens * first.threads, kStripBytes / std::max<int64_t>(row, 1));
    return ceil_div(first.tokens, most);
  }
};

// A normalisation of a strip's rows as a product asks for it.
struct StripRows {
  const NormKernel* kernel;
  Norm norm;
  static void run(const void* state, int64_t begin, int64_t end) {
    const auto& self = *static_cast<const StripRows*>(state);
    self.kernel->run(self.norm, begin, end);
  }
};

inline const float* row_at(const void* rows, int64_t index, int64_t stride) {
  return static_cast<const float*>(rows) + index * stride;
}

inline void run_mlp(const DenseMatmulKernel& kernel, const Mlp& mlp, Scratch& scratch) {
  const int64_t tokens = mlp.first.tokens, strips = mlp.strips(), hidden = mlp.hidden(), inputs = mlp.first.in_features;
  if (tokens <= 0) return;
  const int64_t most = ceil_div(tokens, strips);
  // Strips are of one size or one less; a smaller one may need more workspace.
  size_t workspace = 0;
  for (Matmul one : {mlp.first, mlp.last})
    for (int64_t size : {most, tokens / strips}) {
      one.tokens = size;
      workspace = std::max(workspace, static_cast<size_t>(kernel.workspace_bytes(one)));
    }
  const size_t rows = static_cast<size_t>(most) * 4;
  const Scratch::Lease space(scratch, workspace), held(scratch, rows * hidden), gates(scratch, mlp.gated ? rows * hidden : 0),
      normed(scratch, mlp.before ? rows * inputs : 0);
  for (int64_t s = 0; s < strips; s++) {
    const int64_t begin = tokens * s / strips, count = tokens * (s + 1) / strips - begin;
    Matmul first = mlp.first, gate = mlp.gate, last = mlp.last;
    first.tokens = gate.tokens = last.tokens = count;
    first.workspace = gate.workspace = last.workspace = space.data();
    first.x = row_at(first.x, begin, first.x_stride);
    StripRows before{mlp.before, mlp.before_rows}, after{mlp.after, mlp.after_rows};
    Matmul& reader = mlp.gated ? gate : first;  // runs first, and normalises what both read
    if (mlp.before) {
      before.norm.x = first.x, before.norm.y = normed.data();
      first.x = normed.data(), first.x_stride = inputs;
      reader.rows_wanted = StripRows::run, reader.wanted_state = &before;
    }
    gate.x = first.x, gate.x_stride = first.x_stride;
    first.y = held.data();
    if (mlp.gated) {
      gate.y = gates.data();
      kernel.run(gate);
      first.epilogue.other = gates.data(), first.epilogue.other_stride = hidden;
    }
    kernel.run(first);
    last.x = held.data(), last.x_stride = hidden;
    last.y = const_cast<float*>(row_at(last.y, begin, last.y_stride));
    if (last.epilogue.other) last.epilogue.other = row_at(last.epilogue.other, begin, last.epilogue.other_stride);
    if (mlp.after) {
      after.norm.x = last.y;
      after.norm.y = const_cast<float*>(row_at(mlp.after_rows.y, begin, mlp.after_rows.width));
      last.rows_done = StripRows::run, last.rows_state = &after;
    }
    kernel.run(last);
  }
}

}  // namespace twofour
