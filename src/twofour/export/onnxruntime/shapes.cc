#include "shapes.h"

#include <algorithm>

namespace twofour::ort {

namespace {

// Nodes that one shape is followed through: exporters write some twenty. Some that each read their forerunner twice would be
// followed for ever.
constexpr int kMostSteps = 256;

}  // namespace

// Whether a value is made of tensors inside. Graphs are as deep as their files say, hence no recursion.
bool ShapeReader::depends(int value) {
  struct Visit {
    int value;
    bool inputs_known;
  };
  std::vector<Visit> left{{value, false}};
  while (!left.empty()) {
    auto& [at, inputs_known] = left.back();
    const int one = at, producer = one < 0 ? -1 : graph_.values[static_cast<size_t>(one)].producer;
    if (inputs_known) {
      const auto& inputs = graph_.nodes[static_cast<size_t>(producer)].inputs;
      depends_[one] = std::any_of(inputs.begin(), inputs.end(), [&](int input) { return depends_[input]; });
      left.pop_back();
    } else if (!depends_.try_emplace(one, one >= 0 && tensors_.count(one)).second || depends_[one] || producer < 0) {
      left.pop_back();
    } else {
      inputs_known = true;
      for (const int input : graph_.nodes[static_cast<size_t>(producer)].inputs) left.push_back({input, false});
    }
  }
  return depends_[value];
}

bool ShapeReader::read(int value, Shape* shape) {
  *shape = {};
  if (!graph_.constant(value) && !depends(value)) {
    shape->outside = value;
    return value >= 0 && !graph_.is_constant(value);
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
  sizes->clear();
  return ++steps_ <= kMostSteps && followed(value, sizes) && sizes->size() <= kLongestList;
}

bool ShapeReader::followed(int value, std::vector<Size>* sizes) {
  std::vector<int64_t> numbers;
  if (const Constant* constant = graph_.constant(value)) {
    if (!read_whole(constant, &numbers)) return false;
    for (const int64_t number : numbers) sizes->push_back({Size::constant, number});
    return true;
  }
  if (value < 0 || !depends(value)) {  // one number from outside, as a list of one
    sizes->push_back({Size::outside, value});
    return value >= 0 && !graph_.is_constant(value);
  }
  const Node& node = graph_.nodes[static_cast<size_t>(graph_.values[static_cast<size_t>(value)].producer)];
  nodes_.insert(graph_.index(node));
  if (node.kind == "Shape") {
    const auto tensor = tensors_.find(node.input(0));
    if (tensor == tensors_.end() || node.whole("start", 0) != 0 || node.settings.count("end")) return false;
    *sizes = tensor->second;
    return true;
  }
  // Others than int64 round sizes, or wrap; a list of several numbers would have two axes, or lose them all.
  if (node.kind == "Cast") return node.whole("to", 0) == kInt64 && follow(node.input(0), sizes);
  if (node.kind == "Unsqueeze" || node.kind == "Squeeze") return follow(node.input(0), sizes) && sizes->size() == 1;
  if (node.kind == "Concat") {
    std::vector<Size> part;
    for (const int input : node.inputs) {
      if (!follow(input, &part)) return false;
      sizes->insert(sizes->end(), part.begin(), part.end());
    }
    return true;
  }
  std::vector<Size> from;
  // Places in a list are known only if each part from outside has one number, which a run sees of those that stay in the list.
  const auto follow_places = [&] {
    return follow(node.input(0), &from) && std::none_of(from.begin(), from.end(), [](const Size& one) { return one.from == Size::outside; });
  };
  if (node.kind == "Gather") {
    if (!read_whole(graph_.constant(node.input(1)), &numbers) || !follow_places()) return false;
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
        (node.input(4) >= 0 && !read_whole(graph_.constant(node.input(4)), &steps)) || !follow_places() ||
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
