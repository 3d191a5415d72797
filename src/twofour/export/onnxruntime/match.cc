#include "match.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "match_attention.h"

namespace twofour::ort {
namespace {

// Products below so many weights are left: the call costs more than zeros save.
constexpr int64_t kLeastWeights = 4096;

bool near(float a, float b) { return std::abs(a - b) <= 1e-5f * std::abs(b); }

class Matcher {
 public:
  explicit Matcher(Graph& graph) : graph_(graph), taken_(graph.nodes.size()) {}

  Matches all() {
    for (const Node& node : graph_.nodes) read_projection(node);
    for (const Node& node : graph_.nodes)
      if (node.kind == "Softmax")
        if (auto found = match_attention(graph_, projections_, taken_, node)) take(std::move(*found));
    for (const auto& [out, projection] : projections_)
      if (!taken_[static_cast<size_t>(projection.nodes[0])]) {
        Match one = product(left_of(projection));
        if (graph_.is_read(one.out())) take(std::move(one));
      }
    join_pairs();
    return std::move(found_);
  }

 private:
  // Two products in a row, as in a transformer's hidden layer, become one: what is between them stays in a cache.
  void join_pairs() {
    std::map<int, Match*> readers;
    for (Match& one : found_.all)
      if (one.product) readers[one.product->projection.x] = &one;
    std::set<const Match*> joined;
    for (Match& one : found_.all) {
      if (!one.product || one.product->first || one.product->other >= 0 || one.product->normed >= 0) continue;
      const auto reader = readers.find(one.product->y);
      const Node* next = graph_.only_reader(one.product->y);
      if (reader == readers.end() || reader->second->product->first || !next) continue;
      Match& last = *reader->second;
      // A Reshape to other rows may stand between.
      if (one.product->projection.dense.out != last.product->projection.dense.in) continue;
      const auto& inside = last.product->projection.nodes;
      if (std::find(inside.begin(), inside.end(), graph_.index(*next)) == inside.end()) continue;
      last.product->first = First{one.product->projection, one.product->activation};
      last.nodes.insert(last.nodes.end(), one.nodes.begin(), one.nodes.end());
      joined.insert(&one);
    }
    std::vector<Match> all;
    for (Match& one : found_.all)
      if (!joined.count(&one)) all.push_back(std::move(one));
    found_.all = std::move(all);
  }
  void take(Match match) {
    for (const int node : match.nodes) taken_[static_cast<size_t>(node)] = true;
    found_.all.push_back(std::move(match));
  }
  // A float32 constant of one axis and so many numbers.
  const float* vector(int value, int64_t count, bool row_too = false) {
    const Constant* constant = graph_.constant(value);
    if (!constant || constant->type != kFloat || constant->count() != count) return nullptr;
    const auto& shape = constant->shape;
    const bool flat = shape.size() == 1 || (row_too && shape.size() == 2 && shape[0] == 1);
    return flat ? static_cast<const float*>(constant->data) : nullptr;
  }
  // The other operand of a node of two.
  static int beside(const Node& node, int value) { return node.input(0) == value ? node.input(1) : node.input(0); }

  void leave(const Node& node, const std::string& why) {
    found_.reasons.push_back(node.kind + " `" + (node.name.empty() ? graph_.values[static_cast<size_t>(node.outputs[0])].name : node.name) +
                             "`: " + why);
  }

  void read_projection(const Node& node) {
    const bool gemm = node.kind == "Gemm";
    if (!gemm && node.kind != "MatMul") return;
    if (graph_.is_constant(node.input(0)) || !graph_.is_constant(node.input(1))) return;
    const Constant* weight = graph_.constant(node.input(1));
    if (!weight || weight->type != kFloat) return leave(node, "its weight is not float32");
    if (weight->shape.size() != 2) return leave(node, "its weight does not have two axes");
    const bool turned = gemm && node.whole("transB", 0) != 0;
    const int64_t rows = weight->shape[0], columns = weight->shape[1];
    DenseWeight dense{static_cast<const float*>(weight->data), turned ? rows : columns, turned ? columns : rows,
                      turned ? columns : 1, turned ? 1 : columns, {}};
    const std::string size = "its weight (" + std::to_string(rows) + ", " + std::to_string(columns) + ") ";
    if (dense.in % 4 != 0 || dense.out < 1) return leave(node, size + "has no groups of four along the axis summed over");
    if (dense.in * dense.out < kLeastWeights) return leave(node, size + "is too small to gain");
    if (!is_two_four(dense)) return leave(node, size + "is not 2:4 along the axis summed over");
    if (gemm && (node.whole("transA", 0) != 0 || node.real("alpha", 1) != 1 || node.real("beta", 1) != 1))
      return leave(node, "transA, alpha or beta are not those of a linear layer");
    Projection found{node.input(0), node.input(1), std::move(dense), {graph_.index(node)}, node.outputs[0]};
    if (gemm && node.input(2) >= 0) {
      const float* bias = vector(node.input(2), found.dense.out, true);
      if (!bias) return leave(node, "its third operand is no bias of the outputs");
      found.dense.bias.assign(bias, bias + found.dense.out);
    } else if (const Node* add = graph_.only_reader(found.out); add && add->kind == "Add") {
      if (const float* bias = vector(beside(*add, found.out), found.dense.out)) {
        found.dense.bias.assign(bias, bias + found.dense.out);
        found.nodes.push_back(graph_.index(*add));
        found.out = add->outputs[0];
      }
    }
    found.shaping = {found.dense.in, found.dense.out};
    if (gemm) read_reshapes(&found);
    const int out = found.out;
    projections_.emplace(out, std::move(found));
  }

  // Joins a Reshape to rows in front of a product, and one behind it that leaves the last axis.
  void read_reshapes(Projection* found) {
    std::vector<int64_t> numbers;
    const Node* front = graph_.made_by(found->x, "Reshape");
    if (front && graph_.only_reader(found->x) && read_whole(graph_.constant(front->input(1)), &numbers) && numbers.size() == 2 &&
        numbers[1] == found->shaping.in && !graph_.is_constant(front->input(0))) {
      found->nodes.push_back(graph_.index(*front));
      found->x = front->input(0), found->shaping.flat = true;
    }
    const Node* behind = graph_.only_reader(found->out);
    if (behind && behind->kind == "Reshape" && behind->input(0) == found->out && read_whole(graph_.constant(behind->input(1)), &numbers) &&
        !numbers.empty() && numbers.back() == found->shaping.out) {
      found->nodes.push_back(graph_.index(*behind));
      found->out = behind->outputs[0];
      found->shaping.shape = numbers, found->shaping.zero_copies = behind->whole("allowzero", 0) == 0;
    }
  }

  // A projection without the Reshape in front of it or behind it that attention has taken.
  Projection left_of(Projection projection) const {
    const auto left = [&](const Node* node) {
      if (!node || free(*node)) return false;
      std::erase(projection.nodes, graph_.index(*node));
      return true;
    };
    const Node& first = graph_.nodes[static_cast<size_t>(projection.nodes[0])];
    if (projection.shaping.flat && left(graph_.producer(first.input(0)))) projection.x = first.input(0), projection.shaping.flat = false;
    const Node* behind = graph_.producer(projection.out);
    if (!projection.shaping.shape.empty() && left(behind)) projection.out = behind->input(0), projection.shaping.shape.clear();
    return projection;
  }
  Match product(const Projection& projection) {
    ProductMatch match{{}, projection};
    std::set<int> inside;
    inside.insert(projection.nodes.begin(), projection.nodes.end());
    int value = projection.out;
    value = activated(value, &match, &inside);
    if (const Node* add = graph_.only_reader(value); add && add->kind == "Add" && free(*add)) {
      const int other = beside(*add, value);
      if (other >= 0 && other != value && !graph_.is_constant(other)) {
        match.other = other;
        inside.insert(graph_.index(*add));
        value = add->outputs[0];
      }
    }
    normalised(value, &match, &inside);
    return {{inside.begin(), inside.end()}, std::move(match), {}};
  }
  bool free(const Node& node) const { return !taken_[static_cast<size_t>(graph_.index(node))]; }

  // Joins an activation behind `value`; returns the value that it makes, or `value`.
  int activated(int value, ProductMatch* match, std::set<int>* inside) {
    const auto join = [&](Activation kind, std::initializer_list<const Node*> nodes, int made) {
      for (const Node* node : nodes)
        if (!node || !free(*node)) return value;
      for (const Node* node : nodes) inside->insert(graph_.index(*node));
      match->activation = kind;
      return made;
    };
    if (const Node* next = graph_.only_reader(value)) {
      if (next->kind == "Relu") return join(Activation::relu, {next}, next->outputs[0]);
      const auto found = next->settings.find("approximate");
      const bool tanh = found != next->settings.end() && found->second.text == "tanh";
      if (next->kind == "Gelu" || next->kind == "com.microsoft.Gelu")
        return join(tanh ? Activation::gelu_tanh : Activation::gelu, {next}, next->outputs[0]);
      return value;
    }
    return gelu_formula(value, join);
  }

  // v * (1 + erf(v / sqrt 2)) / 2 in the orders that exporters write; v * sigmoid(v).
  template <class Join>
  int gelu_formula(int value, const Join& join) {
    const GraphValue& made = graph_.values[static_cast<size_t>(value)];
    if (made.leaves || made.consumers.size() != 2) return value;
    for (const int side : {0, 1}) {
      const Node& inner = graph_.nodes[static_cast<size_t>(made.consumers[static_cast<size_t>(side)])];
      const Node& outer = graph_.nodes[static_cast<size_t>(made.consumers[static_cast<size_t>(1 - side)])];
      if (outer.kind != "Mul" || &inner == &outer) continue;
      if (inner.kind == "Sigmoid" && graph_.only_reader(inner.outputs[0]) == &outer)
        return join(Activation::silu, {&inner, &outer}, outer.outputs[0]);
      float number;
      const bool scaled = (inner.kind == "Div" && inner.input(0) == value && read_scalar(graph_.constant(inner.input(1)), &number) &&
                           near(number, 1.4142135f)) ||
                          (inner.kind == "Mul" && read_scalar(graph_.constant(beside(inner, value)), &number) && near(number, 0.70710678f));
      const Node* erf = scaled ? graph_.only_reader(inner.outputs[0]) : nullptr;
      const Node* add = erf && erf->kind == "Erf" ? graph_.only_reader(erf->outputs[0]) : nullptr;
      if (!add || add->kind != "Add" || !read_scalar(graph_.constant(beside(*add, erf->outputs[0])), &number) || number != 1) continue;
      const auto half = [&](const Node* node, int of) {
        return node && node->kind == "Mul" && read_scalar(graph_.constant(beside(*node, of)), &number) && number == 0.5f;
      };
      const Node* second = graph_.only_reader(add->outputs[0]);
      if (second == &outer) {  // (v * (1 + erf)) * 0.5
        const Node* last = graph_.only_reader(outer.outputs[0]);
        if (half(last, outer.outputs[0])) return join(Activation::gelu, {&inner, erf, add, &outer, last}, last->outputs[0]);
      } else if (half(second, add->outputs[0]) && graph_.only_reader(second->outputs[0]) == &outer) {  // v * (0.5 * (1 + erf))
        return join(Activation::gelu, {&inner, erf, add, second, &outer}, outer.outputs[0]);
      } else if (half(&outer, value) && second && second->kind == "Mul" && graph_.only_reader(outer.outputs[0]) == second) {
        return join(Activation::gelu, {&inner, erf, add, &outer, second}, second->outputs[0]);  // (0.5 * v) * (1 + erf)
      }
    }
    return value;
  }

  // Joins a LayerNormalization of the rows of `value`, which others may read as well.
  void normalised(int value, ProductMatch* match, std::set<int>* inside) {
    match->y = value;
    const GraphValue& made = graph_.values[static_cast<size_t>(value)];
    for (const int index : made.consumers) {
      const Node& norm = graph_.nodes[static_cast<size_t>(index)];
      const int64_t width = match->projection.dense.out;
      const auto unused = [&](size_t output) { return output >= norm.outputs.size() || !graph_.is_read(norm.outputs[output]); };
      if (norm.kind != "LayerNormalization" || !free(norm) || norm.input(0) != value || norm.whole("axis", -1) != -1 ||
          !vector(norm.input(1), width) || (norm.input(2) >= 0 && !vector(norm.input(2), width)) || unused(0) || !unused(1) || !unused(2))
        continue;
      match->normed = norm.outputs[0], match->scale = norm.input(1), match->shift = norm.input(2), match->eps = norm.real("epsilon", 1e-5f);
      if (!made.leaves && made.consumers.size() == 1) match->y = -1;
      inside->insert(index);
      return;
    }
  }

  Graph& graph_;
  std::vector<bool> taken_;
  std::map<int, Projection> projections_;
  Matches found_;
};

}  // namespace

Matches match(Graph& graph) { return Matcher(graph).all(); }

}  // namespace twofour::ort
