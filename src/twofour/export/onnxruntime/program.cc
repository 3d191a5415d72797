#include "program.h"

#include <array>
#include <limits>

#include "kernels/attention/run.h"
#include "kernels/fused_matmul/fused_matmul.h"
#include "native/binding.h"
#include "native/isa.h"
#include "native/scratch.h"
#include "tensors.h"

namespace twofour::ort {
namespace {

// The float32 row of a table that asks most of the CPU and runs here: parents stand above their children in the list.
template <class Row>
const Row& best_row() {
  const Row* best = nullptr;
  for (const InstructionSet& set : kInstructionSets)
    for (size_t i = 0; i < TableOf<Row>::count; i++) {
      const Row& row = TableOf<Row>::rows[i];
      if (!std::strcmp(row.isa, set.name) && !std::strcmp(row.dtype, "float32") && cpu_has(row.isa)) best = &row;
    }
  if (!best) throw Failed("no kernel for float32 on this CPU");
  return *best;
}

Sizes answer_of(const Sizes& x, const Shaping& how) {
  const int64_t count = count_of(x);
  if (how.flat ? count % how.in != 0 : x.empty() || x.back() != how.in)
    throw Failed("a product of inputs " + text_of(x) + " by a weight of " + std::to_string(how.in) + " inputs");
  Sizes sizes = how.flat ? Sizes{count / how.in, how.out} : x;
  sizes.back() = how.out;
  return how.shape.empty() ? sizes : reshaped(sizes, how.shape, how.zero_copies);
}

Scratch& scratch() {
  static Scratch all;
  return all;
}
size_t bytes_of(int64_t floats) { return static_cast<size_t>(std::max<int64_t>(floats, 1)) * sizeof(float); }

// Places of the values of a match among the operands of the node that stands for it, and copies of its constants.
class Places {
 public:
  Places(const Api& api, const Claim& claim, Graph& graph, const NodeHandle* fused) : names_(*claim.names), graph_(graph) {
    for (size_t i = 0; i < graph.values.size(); i++) here_.emplace(graph.values[i].name, static_cast<int>(i));
    const auto read = [&](auto number, auto get, std::map<std::string, size_t>& to) {
      size_t count = 0;
      api.check(number(fused, &count));
      std::vector<const ValueInfo*> infos(count);
      if (count) api.check(get(fused, infos.data(), count));
      for (size_t i = 0; i < count; i++) {
        const char* name = nullptr;
        if (!infos[i]) continue;
        api.check(api.GetValueInfoName(infos[i], &name));
        to.emplace(name, i);
      }
    };
    read([&](auto... a) { return api.Node_GetNumInputs(a...); }, [&](auto... a) { return api.Node_GetInputs(a...); }, inputs_);
    read([&](auto... a) { return api.Node_GetNumOutputs(a...); }, [&](auto... a) { return api.Node_GetOutputs(a...); }, outputs_);
  }
  int input(int value) const { return value < 0 ? -1 : place(inputs_, value, "inputs"); }
  int output(int value) const { return value < 0 ? -1 : place(outputs_, value, "outputs"); }
  // Of a constant, which the runtime drops; null for any other value.
  const Constant* dropped(int value) {
    const auto found = here_.find(names_[static_cast<size_t>(value)]);
    return found == here_.end() ? nullptr : graph_.constant(found->second);
  }
  std::vector<float> numbers(int value) {
    if (value < 0) return {};
    const Constant& found = constant(value);
    const auto* const data = static_cast<const float*>(found.data);
    return {data, data + found.count()};
  }
  DenseWeight weight(const Projection& projection) {
    DenseWeight dense = projection.dense;
    dense.data = static_cast<const float*>(constant(projection.weight).data);
    return dense;
  }

 private:
  int place(const std::map<std::string, size_t>& all, int value, const char* role) const {
    const std::string& name = names_[static_cast<size_t>(value)];
    const auto found = all.find(name);
    if (found == all.end()) throw Failed("`" + name + "` is not among the " + role + " of the node that stands for it");
    return static_cast<int>(found->second);
  }

  const Constant& constant(int value) {
    const std::string& name = names_[static_cast<size_t>(value)];
    const auto found = here_.find(name);
    const Constant* constant = found == here_.end() ? nullptr : graph_.constant(found->second);
    if (!constant) throw Failed("the constant `" + name + "` is gone");
    return *constant;
  }

  const std::vector<std::string>& names_;
  Graph& graph_;
  std::map<std::string, int> here_;
  std::map<std::string, size_t> inputs_, outputs_;
};

// y = activation(x W^T + bias) + other, normed = LayerNormalization(y); x that of a run, or what a first product makes of that.
class ProductProgram final : public Program {
 public:
  ProductProgram(const ProductMatch& match, Places& places, int threads)
      : first_(match.first ? std::make_unique<SparseWeight>(std::vector{places.weight(match.first->projection)}) : nullptr),
        first_activation_(match.first ? match.first->activation : Activation::none),
        first_shaping_(match.first ? match.first->projection.shaping : Shaping{}),
        shaping_(match.projection.shaping),
        weight_({places.weight(match.projection)}),
        activation_(match.activation),
        x_(places.input((match.first ? match.first->projection : match.projection).x)),
        other_(places.input(match.other)), y_(places.output(match.y)), normed_(places.output(match.normed)),
        scale_(places.numbers(match.scale)), shift_(places.numbers(match.shift)), eps_(match.eps), threads_(threads) {
    if (first_ && first_->out() != weight_.in())
      throw Failed("a product of " + std::to_string(weight_.in()) + " inputs cannot read one of " + std::to_string(first_->out()) + " outputs");
  }

  void run(const Api& api, KernelContext* context) override {
    const Tensor<float> x = input_of<float>(api, context, static_cast<size_t>(x_));
    const Sizes sizes = answer_of(first_ ? answer_of(x.sizes, first_shaping_) : x.sizes, shaping_);
    Tensor<float> other{nullptr, sizes};
    if (other_ >= 0) other = input_of<float>(api, context, static_cast<size_t>(other_));
    const Sizes all = broadcast(sizes, other.sizes);
    if (normed_ >= 0 && all.back() != weight_.out()) throw Failed("a norm of rows of another width");
    float* const normed = normed_ >= 0 ? output_of(api, context, static_cast<size_t>(normed_), all) : nullptr;
    float* const y = y_ >= 0 ? output_of(api, context, static_cast<size_t>(y_), all) : normed;
    const int64_t tokens = count_of(sizes) / weight_.out();
    if (count_of(all) == 0) return;
    if (other.sizes == sizes) return multiply(x.data, tokens, other.data, y, normed);
    const Scratch::Lease space(scratch(), bytes_of(count_of(sizes)));
    float* const alone = static_cast<float*>(space.data());
    multiply(x.data, tokens, nullptr, alone, nullptr);
    float* to = y;
    for_each(all, steps_of(sizes, all), steps_of(other.sizes, all), [&](int64_t a, int64_t b) { *to++ = alone[a] + other.data[b]; });
    if (normed) best_row<NormKernel>().run(norm(y, normed, count_of(all) / weight_.out()), 0, count_of(all) / weight_.out());
  }

 private:
  Norm norm(const float* x, float* y, int64_t rows) const {
    return {x, weight_.out(), scale_.data(), shift_.empty() ? nullptr : shift_.data(), y, false, rows, weight_.out(), eps_, true};
  }
  void multiply(const float* x, int64_t tokens, const float* other, float* y, float* normed) {
    const Epilogue epilogue{activation_, other ? Combine::add : Combine::none, other, other ? weight_.out() : 0};
    const Part first = first_ ? first_->part(x, tokens, threads_) : Part{};
    const int64_t in = first_ ? first_->in() : weight_.in();
    FusedMatmul all{first, {}, weight_.part(first_ ? nullptr : x, tokens, threads_), first_activation_, epilogue, {}, {}, Type::f32,
                    reinterpret_cast<const char*>(x), in, reinterpret_cast<char*>(y), reinterpret_cast<char*>(normed ? normed : y),
                    tokens, in, threads_};
    if (normed) all.after = {&best_row<NormKernel>(), norm(y, normed, tokens)};
    if (FusedRun(all, scratch()).run()) throw Failed("a packed weight was changed in memory");
  }

  std::unique_ptr<SparseWeight> first_;
  Activation first_activation_;
  Shaping first_shaping_, shaping_;
  SparseWeight weight_;
  Activation activation_;
  int x_, other_, y_, normed_;
  std::vector<float> scale_, shift_;
  float eps_;
  int threads_;
};

// softmax(scale Q K^T + mask) V of heads that stand side by side, Q, K and V computed here by one product or given.
class AttentionProgram final : public Program {
 public:
  AttentionProgram(const AttentionMatch& match, Places& places, int threads)
      : q_(read(match.q, match, places)), k_(read(match.k, match, places)), v_(read(match.v, match, places)), scale_(match.scale),
        unseen_(match.unseen_is_zero ? 0.0f : std::numeric_limits<float>::quiet_NaN()),
        out_shape_(read(match.out_shape, places)), out_zero_copies_(match.out_zero_copies), out_(places.output(match.out)), threads_(threads) {
    for (const int mask : match.masks) {
      const Constant* dropped = places.dropped(mask);
      if (dropped) masks_.push_back({-1, places.numbers(mask), dropped->shape});
      else masks_.push_back({places.input(mask), {}, {}});
    }
    if (match.projections.empty()) return;
    std::vector<DenseWeight> parts;
    for (const Projection& one : match.projections) shapings_[parts.size()] = one.shaping, parts.push_back(places.weight(one));
    weight_ = std::make_unique<SparseWeight>(parts);
    x_ = places.input(match.projections[0].x);
  }

  void run(const Api& api, KernelContext* context) override {
    Run now{api, context, {}};
    View q, k, v;
    std::unique_ptr<Scratch::Lease> space;
    std::vector<std::unique_ptr<Scratch::Lease>> copies;
    if (weight_) {
      const Tensor<float> x = input_of<float>(api, context, static_cast<size_t>(x_));
      const int64_t tokens = count_of(answer_of(x.sizes, shapings_[0])) / shapings_[0].out;
      space = std::make_unique<Scratch::Lease>(scratch(), bytes_of(tokens * weight_->out()));
      auto* const all = static_cast<float*>(space->data());
      if (tokens > 0) project(x.data, tokens, all);
      int64_t before = 0;
      for (const auto& [heads, view, i] : {std::tuple{&q_, &q, 0}, std::tuple{&k_, &k, 1}, std::tuple{&v_, &v, 2}}) {
        const Sizes sizes = answer_of(x.sizes, shapings_[static_cast<size_t>(i)]);
        *view = seen(now, *heads, i, {all + before, sizes}, weight_->out(), copies);
        before += sizes.back();
      }
    } else {
      for (const auto& [heads, view, i] : {std::tuple{&q_, &q, 0}, std::tuple{&k_, &k, 1}, std::tuple{&v_, &v, 2}}) {
        const Tensor<float> given = input_of<float>(api, context, static_cast<size_t>(heads->place));
        *view = seen(now, *heads, i, given, given.sizes.empty() ? 1 : given.sizes.back(), copies);
      }
    }
    attend(now, q, k, v);
  }

 private:
  // A shape whose numbers from outside are known by their places among the inputs; one that is wholly from outside has in
  // `sizes` what was taken for known of it, or nothing.
  struct Read {
    std::vector<Size> sizes;
    int outside;
  };
  struct Side {
    int place;
    Read shape;
    bool zero_copies;
  };
  // An input, or a constant where `place` is -1.
  struct Mask {
    int place;
    std::vector<float> numbers;
    Sizes sizes;
  };
  // Heads in memory: sizes (batch, rows, heads, width), rows `stride` numbers apart.
  struct View {
    const float* data = nullptr;
    std::array<int64_t, 4> sizes{};
    int64_t stride = 0;
    Strides strides(int64_t batch, int64_t heads) const {
      return {sizes[0] == 1 && batch != 1 ? 0 : sizes[1] * stride, sizes[2] == 1 && heads != 1 ? 0 : sizes[3], stride};
    }
  };
  struct Run {
    const Api& api;
    KernelContext* context;
    std::array<std::array<int64_t, 4>, 3> inside;  // sizes of q, k and v
  };

  static Read read(const Shape& shape, Places& places) {
    if (shape.outside >= 0) return {shape.sizes, places.input(shape.outside)};
    Read found{shape.sizes, -1};
    for (Size& one : found.sizes)
      if (one.from == Size::outside) one.number = places.input(static_cast<int>(one.number));
    return found;
  }
  static Side read(const Heads& heads, const AttentionMatch& match, Places& places) {
    return {match.projections.empty() ? places.input(heads.value) : -1, read(heads.shape, places), heads.zero_copies};
  }
  static Sizes resolved(const Run& now, const Read& shape) {
    const auto whole = [&](int64_t place) { return input_of<int64_t>(now.api, now.context, static_cast<size_t>(place)); };
    Sizes all;
    if (shape.outside >= 0) {
      const Tensor<int64_t> numbers = whole(shape.outside);
      all.assign(numbers.data, numbers.data + count_of(numbers.sizes));
      bool as_read = shape.sizes.empty() || shape.sizes.size() == all.size();
      for (size_t i = 0; as_read && i < shape.sizes.size(); i++)
        as_read = shape.sizes[i].from != Size::constant || shape.sizes[i].number == all[i];
      if (!as_read) throw Failed("a shape " + text_of(all) + " whose parts are not of one number each");
      return all;
    }
    for (const Size& one : shape.sizes) {
      if (one.from == Size::outside) {
        const Tensor<int64_t> number = whole(one.number);
        if (count_of(number.sizes) != 1) throw Failed("a part of a shape has " + text_of(number.sizes) + " numbers; wanted one");
        all.push_back(*number.data);
      } else all.push_back(one.from == Size::constant ? one.number : now.inside[static_cast<size_t>(one.number)][static_cast<size_t>(one.axis)]);
    }
    return all;
  }

  void project(const float* x, int64_t tokens, float* y) {
    const FusedMatmul all{{}, {}, weight_->part(x, tokens, threads_), Activation::none, {Activation::none, Combine::none, nullptr, 0}, {}, {},
                          Type::f32, reinterpret_cast<const char*>(x), weight_->in(), reinterpret_cast<char*>(y), reinterpret_cast<char*>(y),
                          tokens, weight_->in(), threads_};
    if (FusedRun(all, scratch()).run()) throw Failed("a packed weight was changed in memory");
  }

  // `given`: rows of its last axis, `stride` apart.
  View seen(Run& now, const Side& side, int number, Tensor<float> given, int64_t stride, std::vector<std::unique_ptr<Scratch::Lease>>& copies) {
    const Sizes sizes = reshaped(given.sizes, resolved(now, side.shape), side.zero_copies);
    if (sizes.size() != 4) throw Failed("heads of shape " + text_of(sizes));
    const int64_t width = given.sizes.empty() ? 1 : given.sizes.back(), own = sizes[2] * sizes[3];
    if (own != width && stride != width) {  // heads that do not fill rows: of rows without gaps alone
      copies.push_back(std::make_unique<Scratch::Lease>(scratch(), bytes_of(count_of(given.sizes))));
      auto* const to = static_cast<float*>(copies.back()->data());
      for (int64_t row = 0; row < count_of(given.sizes) / std::max<int64_t>(width, 1); row++)
        std::copy_n(given.data + row * stride, width, to + row * width);
      given.data = to, stride = width;
    }
    View view{given.data, {sizes[0], sizes[1], sizes[2], sizes[3]}, own == width ? stride : own};
    now.inside[static_cast<size_t>(number)] = view.sizes;
    return view;
  }

  // What is added to the scores: one tensor, or the sum of two.
  Tensor<float> mask_of(const Run& now, std::unique_ptr<Scratch::Lease>& space) const {
    const auto given = [&](size_t i) {
      const Mask& mask = masks_[i];
      return mask.place < 0 ? Tensor<float>{mask.numbers.data(), mask.sizes} : input_of<float>(now.api, now.context, static_cast<size_t>(mask.place));
    };
    const Tensor<float> one = given(0);
    if (masks_.size() == 1) return one;
    const Tensor<float> two = given(1);
    const Sizes all = broadcast(one.sizes, two.sizes);
    space = std::make_unique<Scratch::Lease>(scratch(), bytes_of(count_of(all)));
    auto* const sum = static_cast<float*>(space->data());
    auto* to = sum;
    for_each(all, steps_of(one.sizes, all), steps_of(two.sizes, all), [&](int64_t a, int64_t b) { *to++ = one.data[a] + two.data[b]; });
    return {sum, all};
  }

  void attend(const Run& now, const View& q, const View& k, const View& v) {
    const Sizes batches = broadcast(broadcast({q.sizes[0], q.sizes[2]}, {k.sizes[0], k.sizes[2]}), {v.sizes[0], v.sizes[2]});
    const int64_t batch = batches[0], heads = batches[1], queries = q.sizes[1], keys = k.sizes[1], width = v.sizes[3];
    if (batch != q.sizes[0] || heads != q.sizes[2] || keys != v.sizes[1] || q.sizes[3] != k.sizes[3])
      throw Failed("queries, keys and values that do not belong together");
    const Sizes scores{batch, heads, queries, keys};
    const Sizes answer = reshaped({batch, queries, heads, width}, resolved(now, out_shape_), out_zero_copies_);
    float* const out = output_of(now.api, now.context, static_cast<size_t>(out_), answer);
    if (count_of(answer) == 0) return;
    Attention args{q.data, k.data, v.data, out, q.strides(batch, heads), k.strides(batch, heads), v.strides(batch, heads),
                   {queries * heads * width, width, heads * width}, nullptr, AttentionMask::none, {}, batch, heads, heads, queries, keys,
                   q.sizes[3], width, scale_, false, unseen_, nullptr, nullptr, {}, {}, keys};
    std::unique_ptr<Scratch::Lease> sum, repeated;
    if (!masks_.empty()) {
      const Tensor<float> mask = mask_of(now, sum);
      if (broadcast(mask.sizes, scores) != scores) throw Failed("a mask of shape " + text_of(mask.sizes));
      Sizes steps = steps_of(mask.sizes, scores);
      args.mask = mask.data, args.mask_kind = AttentionMask::add;
      if (keys > 1 && steps[3] == 0) {  // one number for all keys: kernels read a row of them
        repeated = std::make_unique<Scratch::Lease>(scratch(), bytes_of(count_of(scores)));
        auto* to = static_cast<float*>(repeated->data());
        args.mask = to;
        for_each(scores, steps, steps, [&](int64_t a, int64_t) { *to++ = mask.data[a]; });
        steps = steps_of(scores, scores);
      }
      args.mask_strides = {steps[0], steps[1], steps[2]};
    }
    run_attention(best_row<AttentionKernel>(), args, threads_);
  }

  Side q_, k_, v_;
  float scale_, unseen_;
  std::vector<Mask> masks_;  // two at most
  Read out_shape_;
  bool out_zero_copies_;
  int out_, threads_, x_ = -1;
  std::unique_ptr<SparseWeight> weight_;
  std::array<Shaping, 3> shapings_;
};

}  // namespace

std::unique_ptr<Program> compiled(const Api& api, const Claim& claim, const GraphHandle* handle, const NodeHandle* fused, int threads) {
  Graph graph(api, handle);
  Places places(api, claim, graph, fused);
  if (claim.match.product) return std::make_unique<ProductProgram>(*claim.match.product, places, threads);
  return std::make_unique<AttentionProgram>(*claim.match.attention, places, threads);
}

}  // namespace twofour::ort
