#include "match.h"

#include <algorithm>
#include <cmath>
#include <set>

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
      if (node.kind == "Softmax") {
        auto found = attention(node, true);
        if (!found) found = attention(node, false);
        if (found) take(std::move(*found));
      }
    for (const auto& [out, projection] : projections_)
      if (!taken_[static_cast<size_t>(projection.nodes[0])]) take(product(left_of(projection)));
    join_pairs();
    return std::move(found_);
  }

 private:
  // Nodes of a match in the making, and the values that leave it.
  struct Inside {
    std::set<int> nodes;
    std::set<int> out;
  };

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
  const Node* producer(int value) const {
    const int node = value < 0 ? -1 : graph_.values[static_cast<size_t>(value)].producer;
    return node < 0 ? nullptr : &graph_.nodes[static_cast<size_t>(node)];
  }
  // Whether nothing outside reads what is made inside, but for what leaves, and no node is another match's.
  bool closed(const Inside& inside) const {
    for (const int index : inside.nodes) {
      if (taken_[static_cast<size_t>(index)]) return false;
      for (const int value : graph_.nodes[static_cast<size_t>(index)].outputs) {
        if (value < 0 || inside.out.count(value)) continue;
        const GraphValue& made = graph_.values[static_cast<size_t>(value)];
        if (made.leaves) return false;
        for (const int reader : made.consumers)
          if (!inside.nodes.count(reader)) return false;
      }
    }
    return true;
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
    if (graph_.constant(node.input(0)) || node.input(1) < 0 || !graph_.values[static_cast<size_t>(node.input(1))].constant) return;
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
        numbers[1] == found->shaping.in) {
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

  // What is known of the inside of an attention while it is read.
  struct Views {
    std::map<int, std::vector<Size>> tensors;
    std::vector<std::pair<int, bool>> factors;  // of the scores: a number, and whether it divides
    Inside inside;
  };
  // Whether a value is one number that a graph computes of constants and of a tensor's sizes.
  bool is_formula(int value) {
    float number;
    if (read_scalar(graph_.constant(value), &number)) return true;
    const Node* node = producer(value);
    if (!node) return false;
    if (node->kind == "Cast") return node->whole("to", 0) == kFloat && graph_.made_by(node->input(0), "Slice") != nullptr;
    if (node->kind == "Sqrt" || node->kind == "Reciprocal") return is_formula(node->input(0));
    return (node->kind == "Mul" || node->kind == "Div") && is_formula(node->input(0)) && is_formula(node->input(1));
  }
  // The number; false where it depends on a size that is not constant.
  bool read_formula(int value, Views* views, float* number) {
    if (read_scalar(graph_.constant(value), number)) return true;
    const Node& node = *producer(value);
    views->inside.nodes.insert(graph_.index(node));
    if (node.kind == "Cast") {
      Shape shape;
      if (!read_shape(node.input(0), views, &shape) || shape.sizes.size() != 1 || shape.sizes[0].from != Size::constant) return false;
      *number = static_cast<float>(shape.sizes[0].number);
      return true;
    }
    float second = 1;
    if (!read_formula(node.input(0), views, number)) return false;
    if (node.kind == "Sqrt") *number = std::sqrt(*number);
    else if (node.kind == "Reciprocal") *number = 1 / *number;
    else if (!read_formula(node.input(1), views, &second)) return false;
    else *number = node.kind == "Mul" ? *number * second : *number / second;
    return true;
  }
  // Steps over Mul or Div by a number, which is read when the shapes are known.
  int unscaled(int value, Views* views) {
    for (;;) {
      const Node* node = producer(value);
      if (!node || (node->kind != "Mul" && node->kind != "Div")) return value;
      const bool second = is_formula(node->input(1));
      if (!second && (node->kind == "Div" || !is_formula(node->input(0)))) return value;
      views->factors.emplace_back(node->input(second ? 1 : 0), node->kind == "Div");
      views->inside.nodes.insert(graph_.index(*node));
      value = node->input(second ? 0 : 1);
    }
  }
  bool read_factors(Views* views, float* scale) {
    for (const auto& [value, divides] : views->factors) {
      float number;
      if (!read_formula(value, views, &number)) return false;
      *scale = divides ? *scale / number : *scale * number;
    }
    return true;
  }
  const Node* transposed(int value, const std::vector<int64_t>& order) const {
    const Node* node = graph_.made_by(value, "Transpose");
    const auto found = node ? node->settings.find("perm") : std::map<std::string, Setting>::const_iterator{};
    return node && found != node->settings.end() && found->second.list == order ? node : nullptr;
  }

  bool read_shape(int value, Views* views, Shape* shape) {
    ShapeReader reader(graph_, views->tensors);
    if (!reader.read(value, shape)) return false;
    if (shape->outside >= 0) reader.look_outside(4, shape);
    views->inside.nodes.insert(reader.nodes().begin(), reader.nodes().end());
    return true;
  }
  // `value`: a Reshape of (..., columns) to (batch, rows, heads, width), which becomes tensor `number`.
  bool read_heads(int value, int number, Views* views, Heads* heads, std::vector<Size>* sizes) {
    const Node* reshape = graph_.made_by(value, "Reshape");
    if (!reshape || !read_shape(reshape->input(1), views, &heads->shape)) return false;
    if (heads->shape.outside < 0 && heads->shape.sizes.size() != 4) return false;
    heads->value = reshape->input(0);
    heads->zero_copies = reshape->whole("allowzero", 0) == 0;
    views->inside.nodes.insert(graph_.index(*reshape));
    sizes->clear();
    for (int64_t axis = 0; axis < 4; axis++) {
      const auto& known = heads->shape.sizes;
      const bool constant = known.size() == 4 && known[static_cast<size_t>(axis)].from == Size::constant && known[static_cast<size_t>(axis)].number > 0;
      sizes->push_back(constant ? known[static_cast<size_t>(axis)] : Size{Size::inside, number, axis});
    }
    views->tensors[value] = *sizes;
    return true;
  }
  // The same behind a Transpose to (batch, heads, rows, width).
  bool read_heads_of(int value, int number, Views* views, Heads* heads, std::vector<Size>* sizes) {
    const Node* turn = transposed(value, {0, 2, 1, 3});
    if (!turn || !read_heads(turn->input(0), number, views, heads, sizes)) return false;
    views->inside.nodes.insert(graph_.index(*turn));
    *sizes = {(*sizes)[0], (*sizes)[2], (*sizes)[1], (*sizes)[3]};
    views->tensors[value] = *sizes;
    return true;
  }
  // Whether a Reshape's second operand is `wanted`. One size may be left to be found, or not be known: it is what is left.
  bool is_shape(const Node& reshape, const std::vector<Size>& wanted, Views* views) {
    Shape shape;
    if (!read_shape(reshape.input(1), views, &shape) || shape.outside >= 0 || shape.sizes.size() != wanted.size()) return false;
    int left = 0;
    for (size_t i = 0; i < wanted.size(); i++) {
      const Size &one = shape.sizes[i], &other = wanted[i];
      if (one == other && !(one.from == Size::constant && one.number == -1)) continue;
      const bool differ = one.from == Size::constant && other.from == Size::constant && one.number >= 0 && other.number >= 0;
      if (differ || ++left > 1) return false;
    }
    return true;
  }
  // K^T, (batch, heads, width, rows): one Transpose; or rows and width exchanged in a tensor of three axes.
  bool read_keys(int value, Views* views, Heads* heads, std::vector<Size>* sizes) {
    auto& nodes = views->inside.nodes;
    if (const Node* turn = transposed(value, {0, 2, 3, 1})) {
      if (!read_heads(turn->input(0), 1, views, heads, sizes)) return false;
      nodes.insert(graph_.index(*turn));
      *sizes = {(*sizes)[0], (*sizes)[2], (*sizes)[3], (*sizes)[1]};
    } else if (const Node* twice = transposed(value, {0, 1, 3, 2})) {
      const Node* same = graph_.made_by(twice->input(0), "Reshape");
      if (!read_heads_of(same ? same->input(0) : twice->input(0), 1, views, heads, sizes)) return false;
      if (same && !is_shape(*same, *sizes, views)) return false;
      if (same) nodes.insert(graph_.index(*same));
      nodes.insert(graph_.index(*twice));
      *sizes = {(*sizes)[0], (*sizes)[1], (*sizes)[3], (*sizes)[2]};
    } else {
      const Node* back = graph_.made_by(value, "Reshape");
      const Node* turned = back ? transposed(back->input(0), {0, 2, 1}) : nullptr;
      const Node* flat = turned ? graph_.made_by(turned->input(0), "Reshape") : nullptr;
      if (!flat || !read_heads_of(flat->input(0), 1, views, heads, sizes)) return false;
      const auto& s = *sizes;
      const std::vector<Size> exchanged{s[0], s[1], s[3], s[2]};
      if (!is_shape(*flat, {{Size::constant, -1}, s[2], s[3]}, views) || !is_shape(*back, exchanged, views)) return false;
      for (const Node* node : {back, turned, flat}) nodes.insert(graph_.index(*node));
      *sizes = exchanged;
    }
    views->tensors[value] = *sizes;
    return true;
  }

  // Q K^T of the operand of a Softmax, and what is added to it: a mask, a bias by position.
  const Node* scores_of(int value, AttentionMatch* match, Views* views) {
    const auto product = [&](int of) -> const Node* {
      Views steps = *views;
      const Node* node = graph_.made_by(unscaled(of, &steps), "MatMul");
      if (!node || graph_.constant(node->input(0)) || graph_.constant(node->input(1))) return nullptr;
      *views = std::move(steps);
      return node;
    };
    if (const Node* found = product(value)) return found;
    const Node* add = graph_.made_by(value, "Add");
    if (!add || match->masks.size() == 2) return nullptr;
    for (const int side : {0, 1}) {
      match->masks.push_back(add->input(static_cast<size_t>(1 - side)));
      if (const Node* found = scores_of(add->input(static_cast<size_t>(side)), match, views)) {
        views->inside.nodes.insert(graph_.index(*add));
        return found;
      }
      match->masks.pop_back();
    }
    return nullptr;
  }

  // The shares of a Softmax as the second product reads them: behind a Where that puts 0 in place of NaN, where there is one.
  int shares_of(const Node& softmax, AttentionMatch* match, Inside* inside) {
    const int shares = softmax.outputs[0];
    for (const int index : graph_.values[static_cast<size_t>(shares)].consumers) {
      const Node& node = graph_.nodes[static_cast<size_t>(index)];
      float number;
      if (node.kind != "Where" || node.input(2) != shares || !read_scalar(graph_.constant(node.input(1)), &number) || number != 0) continue;
      const Node* asks = graph_.made_by(node.input(0), "IsNaN");
      if (!asks || asks->input(0) != shares) continue;
      match->unseen_is_zero = true;
      inside->nodes.insert(index), inside->nodes.insert(graph_.index(*asks));
      return node.outputs[0];
    }
    return shares;
  }

  std::optional<Match> attention(const Node& softmax, bool with_projections) {
    AttentionMatch match;
    Views views;
    auto& nodes = views.inside.nodes;
    nodes.insert(graph_.index(softmax));
    const int64_t axis = softmax.whole("axis", -1);
    if (softmax.since < 13 || (axis != -1 && axis != 3)) return {};
    const Node* scores = scores_of(softmax.input(0), &match, &views);
    const int shares = shares_of(softmax, &match, &views.inside);
    const Node* weighted = graph_.only_reader(shares);
    if (!scores || !weighted || weighted->kind != "MatMul" || weighted->input(0) != shares) return {};
    nodes.insert({graph_.index(*scores), graph_.index(*weighted)});
    std::vector<Size> q, k, v;
    const int queries = unscaled(scores->input(0), &views);
    const int keys = unscaled(scores->input(1), &views);
    if (!read_heads_of(queries, 0, &views, &match.q, &q) || !read_keys(keys, &views, &match.k, &k) ||
        !read_heads_of(weighted->input(1), 2, &views, &match.v, &v) || !read_answer(weighted->outputs[0], {q[0], q[1], q[2], v[3]}, &views, &match))
      return {};
    if (!read_factors(&views, &match.scale) || !read_projections(with_projections, &views, &match)) return {};
    views.inside.out = {match.out};
    // Nothing that is from outside may be made of what is inside: it would have to exist before and after.
    if (!closed(views.inside)) return {};
    return Match{{nodes.begin(), nodes.end()}, {}, std::move(match)};
  }

  // (batch, heads, rows, width) -> (batch, rows, heads, width) -> the answer, behind a Reshape that changes nothing, if any.
  bool read_answer(int value, const std::vector<Size>& sizes, Views* views, AttentionMatch* match) {
    views->tensors[value] = sizes;
    const auto next = [&](int of) -> const Node* {  // but for who asks for its shape
      const Node* found = nullptr;
      for (const int index : graph_.values[static_cast<size_t>(of)].consumers) {
        const Node& node = graph_.nodes[static_cast<size_t>(index)];
        if (node.kind == "Shape") continue;
        if (found) return nullptr;
        found = &node;
      }
      return found;
    };
    const Node* turn = next(value);
    if (turn && turn->kind == "Reshape") {
      if (turn->input(0) != value || !is_shape(*turn, sizes, views)) return false;
      views->inside.nodes.insert(graph_.index(*turn));
      views->tensors[turn->outputs[0]] = sizes;
      turn = next(turn->outputs[0]);
    }
    if (!turn || !transposed(turn->outputs[0], {0, 2, 1, 3})) return false;
    views->tensors[turn->outputs[0]] = {sizes[0], sizes[2], sizes[1], sizes[3]};
    const Node* reshape = next(turn->outputs[0]);
    if (!reshape || reshape->kind != "Reshape" || reshape->input(0) != turn->outputs[0] ||
        !read_shape(reshape->input(1), views, &match->out_shape))
      return false;
    views->inside.nodes.insert({graph_.index(*turn), graph_.index(*reshape)});
    match->out_zero_copies = reshape->whole("allowzero", 0) == 0;
    match->out = reshape->outputs[0];
    return true;
  }

  // Q, K and V of one tensor, all by sparse weights: one product of the three.
  bool read_projections(bool wanted, Views* views, AttentionMatch* match) {
    std::vector<const Projection*> all;
    for (const Heads* heads : {&match->q, &match->k, &match->v})
      if (const auto found = projections_.find(heads->value); found != projections_.end()) all.push_back(&found->second);
    if (all.empty()) return false;
    if (!wanted) return true;
    if (all.size() != 3 || all[0]->x != all[1]->x || all[0]->x != all[2]->x || all[0] == all[1] || all[1] == all[2] || all[0] == all[2])
      return false;
    for (const Projection* one : all) {
      match->projections.push_back(*one);
      views->inside.nodes.insert(one->nodes.begin(), one->nodes.end());
    }
    return true;
  }

  // A projection without the Reshape in front of it or behind it that attention has taken.
  Projection left_of(Projection projection) const {
    const auto left = [&](const Node* node) {
      if (!node || free(*node)) return false;
      std::erase(projection.nodes, graph_.index(*node));
      return true;
    };
    const Node& first = graph_.nodes[static_cast<size_t>(projection.nodes[0])];
    if (projection.shaping.flat && left(producer(first.input(0)))) projection.x = first.input(0), projection.shaping.flat = false;
    const Node* behind = producer(projection.out);
    if (!projection.shaping.shape.empty() && left(behind)) projection.out = behind->input(0), projection.shaping.shape.clear();
    return projection;
  }
  Match product(const Projection& projection) {
    ProductMatch match{{}, projection};
    Inside inside;
    inside.nodes.insert(projection.nodes.begin(), projection.nodes.end());
    int value = projection.out;
    value = activated(value, &match, &inside);
    if (const Node* add = graph_.only_reader(value); add && add->kind == "Add" && free(*add)) {
      const int other = beside(*add, value);
      if (other >= 0 && other != value && !graph_.constant(other)) {
        match.other = other;
        inside.nodes.insert(graph_.index(*add));
        value = add->outputs[0];
      }
    }
    normalised(value, &match, &inside);
    return {{inside.nodes.begin(), inside.nodes.end()}, std::move(match), {}};
  }
  bool free(const Node& node) const { return !taken_[static_cast<size_t>(graph_.index(node))]; }

  // Joins an activation behind `value`; returns the value that it makes, or `value`.
  int activated(int value, ProductMatch* match, Inside* inside) {
    const auto join = [&](Activation kind, std::initializer_list<const Node*> nodes, int made) {
      for (const Node* node : nodes)
        if (!node || !free(*node)) return value;
      for (const Node* node : nodes) inside->nodes.insert(graph_.index(*node));
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
  void normalised(int value, ProductMatch* match, Inside* inside) {
    match->y = value;
    const GraphValue& made = graph_.values[static_cast<size_t>(value)];
    for (const int index : made.consumers) {
      const Node& norm = graph_.nodes[static_cast<size_t>(index)];
      const int64_t width = match->projection.dense.out;
      const auto unused = [&](size_t output) {
        const int at = output < norm.outputs.size() ? norm.outputs[output] : -1;
        return at < 0 || (!graph_.values[static_cast<size_t>(at)].leaves && graph_.values[static_cast<size_t>(at)].consumers.empty());
      };
      if (norm.kind != "LayerNormalization" || !free(norm) || norm.input(0) != value || norm.whole("axis", -1) != -1 ||
          !vector(norm.input(1), width) || (norm.input(2) >= 0 && !vector(norm.input(2), width)) || !unused(1) || !unused(2))
        continue;
      match->normed = norm.outputs[0], match->scale = norm.input(1), match->shift = norm.input(2), match->eps = norm.real("epsilon", 1e-5f);
      if (!made.leaves && made.consumers.size() == 1) match->y = -1;
      inside->nodes.insert(index);
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
