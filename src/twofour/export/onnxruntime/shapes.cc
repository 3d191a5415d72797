#include "shapes.h"

#include <algorithm>

namespace twofour::ort {

// Whether a value is made of tensors inside; asked of small values alone, whose makers are few.
bool ShapeReader::depends(int value) {
  if (value < 0) return false;
  if (tensors_.count(value)) return true;
  const auto [at, is_new] = depends_.try_emplace(value, false);
  if (!is_new) return at->second;
  const int producer = graph_.values[static_cast<size_t>(value)].producer;
  if (producer < 0) return false;
  bool found = false;
  for (const int input : graph_.nodes[static_cast<size_t>(producer)].inputs) found = found || depends(input);
  return depends_[value] = found;
}

bool ShapeReader::read(int value, Shape* shape) {
  *shape = {};
  if (!graph_.constant(value) && !depends(value)) {
    shape->outside = value;
    return true;
  }
  return follow(value, &shape->sizes);
}

void ShapeReader::look_outside(size_t count, Shape* shape) {
  const Node* concat = graph_.made_by(shape->outside, "Concat");
  if (!concat || concat->inputs.size() != count) return;
  for (const int input : concat->inputs) {
    std::vector<int64_t> number;
    const bool known = read_whole(graph_.constant(input), &number) && number.size() == 1;
    shape->sizes.push_back(known ? Size{Size::constant, number[0]} : Size{Size::outside, input});
  }
}

bool ShapeReader::follow(int value, std::vector<Size>* sizes) {
  std::vector<int64_t> numbers;
  sizes->clear();
  if (const Constant* constant = graph_.constant(value)) {
    if (!read_whole(constant, &numbers)) return false;
    for (const int64_t number : numbers) sizes->push_back({Size::constant, number});
    return true;
  }
  if (value < 0 || !depends(value)) {  // one number from outside, as a list of one
    sizes->push_back({Size::outside, value});
    return value >= 0;
  }
  const Node& node = graph_.nodes[static_cast<size_t>(graph_.values[static_cast<size_t>(value)].producer)];
  nodes_.insert(graph_.index(node));
  if (node.kind == "Shape") {
    const auto tensor = tensors_.find(node.input(0));
    if (tensor == tensors_.end() || node.whole("start", 0) != 0 || node.settings.count("end")) return false;
    *sizes = tensor->second;
    return true;
  }
  if (node.kind == "Unsqueeze" || node.kind == "Squeeze" || node.kind == "Cast") return follow(node.input(0), sizes);
  if (node.kind == "Concat") {
    std::vector<Size> part;
    for (const int input : node.inputs) {
      if (!follow(input, &part)) return false;
      sizes->insert(sizes->end(), part.begin(), part.end());
    }
    return true;
  }
  std::vector<Size> from;
  if (node.kind == "Gather") {
    if (!read_whole(graph_.constant(node.input(1)), &numbers) || !follow(node.input(0), &from)) return false;
    const auto count = static_cast<int64_t>(from.size());
    for (int64_t index : numbers) {
      index += index < 0 ? count : 0;
      if (index < 0 || index >= count) return false;
      sizes->push_back(from[static_cast<size_t>(index)]);
    }
    return true;
  }
  if (node.kind == "Slice") {
    std::vector<int64_t> begins, ends, steps{1};
    if (!read_whole(graph_.constant(node.input(1)), &begins) || !read_whole(graph_.constant(node.input(2)), &ends) ||
        (node.input(4) >= 0 && !read_whole(graph_.constant(node.input(4)), &steps)) || !follow(node.input(0), &from) ||
        begins.size() != 1 || ends.size() != 1 || steps != std::vector<int64_t>{1})
      return false;
    const auto count = static_cast<int64_t>(from.size());
    const auto place = [&](int64_t at) { return std::clamp<int64_t>(at < 0 ? at + count : at, 0, count); };
    for (int64_t i = place(begins[0] < -count ? 0 : begins[0]); i < place(ends[0] < -count ? 0 : ends[0]); i++)
      sizes->push_back(from[static_cast<size_t>(i)]);
    return true;
  }
  return false;
}

}  // namespace twofour::ort
