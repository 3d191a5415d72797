// Which nodes of a graph run here, and as what: a product by a 2:4 weight with what stands behind it, or attention with the
// products in front of it. A match reads nothing that it does not say and everything inside it is read by it alone, so that a
// runtime may put it in place of its nodes.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "graph.h"
#include "kernels/epilogue.h"
#include "shapes.h"
#include "weight.h"

namespace twofour::ort {

// What becomes of the sizes of x in a product: (..., in) -> (..., out); `flat`: (rows, out) instead, of as many rows of `in` as
// x has. `shape`, where it is not empty: what a Reshape behind makes of that, `out` last.
struct Shaping {
  int64_t in = 0, out = 0;
  bool flat = false;
  std::vector<int64_t> shape = {};
  bool zero_copies = false;
};

// x W^T + bias of a constant W: MatMul or Gemm, the Add of a constant behind it, and the two Reshape that ONNX Runtime itself
// puts around a Gemm.
struct Projection {
  int x, weight;
  DenseWeight dense;  // its numbers are the graph's
  std::vector<int> nodes;
  int out;  // the value it ends with
  Shaping shaping = {};
};

// A product that is the input of another one and nothing else.
struct First {
  Projection projection;
  Activation activation;
};

// y = activation(x W^T + bias) + other, normed = LayerNormalization(y); -1 for a value that is not there. Where there is a
// `first`, x is what that answers.
struct ProductMatch {
  std::optional<First> first;
  Projection projection;
  Activation activation = Activation::none;
  int other = -1;
  int y = -1, normed = -1;
  int scale = -1, shift = -1;  // constants of the norm
  float eps = 0;
};

// softmax(scale Q K^T + mask) V, heads laid side by side: `shape` of what q, k and v are seen as, (batch, rows, heads, width).
struct Heads {
  int value;  // (..., columns)
  Shape shape;
  bool zero_copies;  // what a zero in `shape` stands for
};
struct AttentionMatch {
  std::vector<Projection> projections;  // of q, k and v, by one x, or none: then they are values of others
  Heads q, k, v;
  std::vector<int> masks;  // two at most
  float scale = 1;
  bool unseen_is_zero = false;  // what a query answers whose keys are all hidden: 0, else NaN
  Shape out_shape;
  bool out_zero_copies;
  int out;
};

struct Match {
  std::vector<int> nodes;
  std::optional<ProductMatch> product;
  std::optional<AttentionMatch> attention;

  // What the first of its products reads and is.
  const Projection* start() const {
    if (product) return product->first ? &product->first->projection : &product->projection;
    return attention->projections.empty() ? nullptr : &attention->projections[0];
  }
  // One of the values that leave it.
  int out() const { return attention ? attention->out : product->y >= 0 ? product->y : product->normed; }
};

struct Matches {
  std::vector<Match> all;
  std::vector<std::string> reasons;  // of products by constants that are left: which, and why
};

Matches match(Graph& graph);

}  // namespace twofour::ort
