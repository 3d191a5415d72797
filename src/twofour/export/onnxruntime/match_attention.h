// Attention around a Softmax, in the forms that exporters write.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "match.h"

namespace twofour::ort {

// With the products of Q, K and V inside where those are of one tensor, else without; nothing where its shape is another, none
// of the three is one of `projections` (by the values that they end with), or a node of it is `taken`.
std::optional<Match> match_attention(Graph& graph, const std::map<int, Projection>& projections, const std::vector<bool>& taken,
                                     const Node& softmax);

}  // namespace twofour::ort
