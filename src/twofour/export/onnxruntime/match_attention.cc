#include "match_attention.h"

#include <algorithm>
#include <cmath>
#include <set>

namespace twofour::ort {
namespace {

class AttentionReader {
 public:
  AttentionReader(Graph& graph, const std::map<int, Projection>& projections, const std::vector<bool>& taken)
      : graph_(graph), projections_(projections), taken_(taken) {}

  std::optional<Match> read(const Node& softmax, bool with_projections) {
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
    // Nothing outside reads what is made inside, so nothing that is read from outside is made of it.
    if (!closed(views.inside) || !graph_.is_read(match.out) || reads_itself(match, views.inside)) return {};
    return Match{{nodes.begin(), nodes.end()}, {}, std::move(match)};
  }

 private:
  // Nodes of a match in the making, and the values that leave it.
  struct Inside {
    std::set<int> nodes;
    std::set<int> out;
  };

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

  // Whether an operand is made inside: heads of another head's tensor are.
  bool reads_itself(const AttentionMatch& match, const Inside& inside) const {
    std::vector<int> operands = match.masks;
    for (const Projection& one : match.projections) operands.push_back(one.x);
    for (const Heads* heads : {&match.q, &match.k, &match.v}) {
      if (match.projections.empty()) operands.push_back(heads->value);
      operands.push_back(heads->shape.outside);
    }
    operands.push_back(match.out_shape.outside);
    return std::any_of(operands.begin(), operands.end(), [&](int value) {
      const Node* made = value < 0 ? nullptr : graph_.producer(value);
      return made && inside.nodes.count(graph_.index(*made)) > 0;
    });
  }

  // What is known of the inside of an attention while it is read.
  struct Views {
    std::map<int, std::vector<Size>> tensors;
    std::vector<std::pair<int, bool>> factors;  // of the scores: a number, and whether it divides
    Inside inside;
  };

  // Whether a value is one number that a graph computes of constants and of a tensor's sizes, in so many steps at most: a few
  // nodes that each read their forerunner twice are a formula of any length.
  bool is_formula(int value, int deepest = 8) {
    float number;
    if (read_scalar(graph_.constant(value), &number)) return true;
    const Node* node = graph_.producer(value);
    if (!node || deepest == 0) return false;
    if (node->kind == "Cast") return node->whole("to", 0) == kFloat && graph_.made_by(node->input(0), "Slice") != nullptr;
    if (node->kind == "Sqrt" || node->kind == "Reciprocal") return is_formula(node->input(0), deepest - 1);
    return (node->kind == "Mul" || node->kind == "Div") && is_formula(node->input(0), deepest - 1) && is_formula(node->input(1), deepest - 1);
  }
  // The number; false where it depends on a size that is not constant.
  bool read_formula(int value, Views* views, float* number) {
    if (read_scalar(graph_.constant(value), number)) return true;
    const Node& node = *graph_.producer(value);
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
      const Node* node = graph_.producer(value);
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
    if (!reshape || graph_.is_constant(reshape->input(0)) || !read_shape(reshape->input(1), views, &heads->shape)) return false;
    if (heads->shape.outside < 0 && heads->shape.sizes.size() != 4) return false;
    heads->value = reshape->input(0);
    heads->zero_copies = reshape->whole("allowzero", 0) == 0;
    views->inside.nodes.insert(graph_.index(*reshape));
    sizes->clear();
    for (int64_t axis = 0; axis < 4; axis++) {
      const auto& known = heads->shape.sizes;
      const Size* one = known.size() == 4 ? &known[static_cast<size_t>(axis)] : nullptr;
      const bool constant = one && one->from == Size::constant && one->number > 0;
      sizes->push_back(constant ? *one : Size{Size::inside, number, axis});
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
      if (!node || graph_.is_constant(node->input(0)) || graph_.is_constant(node->input(1))) return nullptr;
      *views = std::move(steps);
      return node;
    };
    if (const Node* found = product(value)) return found;
    const Node* add = graph_.made_by(value, "Add");
    if (!add || match->masks.size() == 2) return nullptr;
    for (const int side : {0, 1}) {
      const int mask = add->input(static_cast<size_t>(1 - side));
      if (graph_.is_constant(mask) && !graph_.constant(mask)) continue;
      match->masks.push_back(mask);
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
    // A Reshape in front of a product may make other rows of x than those of the product beside it.
    if (all[0]->dense.in != all[1]->dense.in || all[0]->dense.in != all[2]->dense.in) return false;
    for (const Projection* one : all) {
      match->projections.push_back(*one);
      views->inside.nodes.insert(one->nodes.begin(), one->nodes.end());
    }
    return true;
  }

  Graph& graph_;
  const std::map<int, Projection>& projections_;
  const std::vector<bool>& taken_;
};

}  // namespace

std::optional<Match> match_attention(Graph& graph, const std::map<int, Projection>& projections, const std::vector<bool>& taken,
                                     const Node& softmax) {
  AttentionReader reader(graph, projections, taken);
  auto found = reader.read(softmax, true);
  return found ? std::move(found) : reader.read(softmax, false);
}

}  // namespace twofour::ort
