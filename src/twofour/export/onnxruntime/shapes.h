// Sizes that a graph computes of its own tensors: Shape, Gather, Slice, Concat and their like, followed back to constants, to
// sizes of tensors inside a match, and to numbers that come from outside it.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "graph.h"

namespace twofour::ort {

// One size: a constant; or element `axis` of the shape of a tensor inside; or of a value of whole numbers from outside.
struct Size {
  enum From { constant, inside, outside } from;
  int64_t number;  // the constant, the tensor's number inside, or the value outside
  int64_t axis = 0;
  bool operator==(const Size&) const = default;
};

// A list of sizes. Where it is wholly from outside, `outside` is that value; `sizes` has what is known of it all the same, or
// is empty.
struct Shape {
  std::vector<Size> sizes;
  int outside = -1;
};

// Follows shapes back. `tensors`: values inside a match and their sizes. What it passes joins `nodes`.
class ShapeReader {
 public:
  ShapeReader(Graph& graph, const std::map<int, std::vector<Size>>& tensors) : graph_(graph), tensors_(tensors) {}

  // False where a shape depends on the inside in a way that is not followed.
  bool read(int value, Shape* shape);
  // Of a shape from outside that is put together of `count` lists, each of one size unless a run shows otherwise: which of
  // them are constant.
  void look_outside(size_t count, Shape* shape);
  const std::set<int>& nodes() const { return nodes_; }

 private:
  bool depends(int value);
  bool follow(int value, std::vector<Size>* sizes);
  bool followed(int value, std::vector<Size>* sizes);

  Graph& graph_;
  const std::map<int, std::vector<Size>>& tensors_;
  std::set<int> nodes_;
  std::map<int, bool> depends_;
  int steps_ = 0;
};

}  // namespace twofour::ort
