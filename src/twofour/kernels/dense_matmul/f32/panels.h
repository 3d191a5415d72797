// The dense float32 product: weights in panels of 32 outputs, tokens in blocks whose sums stay in registers.
//
//     weight (out, in)            panels: one row of 32 per input       x (tokens, in)       block: one row of T per input
//        k0 k1 ..                    m0 m1 .. m31                          k0 k1 ..             t0 t1 .. t(T-1)
//     m0  a  b  .   prepare      k0   a  c  .                           t0  p  q      pack   k0  p  r  .
//     m1  c  .  .   ------->     k1   b  .  .                           t1  r  .      --->   k1  q  .  .
//
// A unit is one panel by one block: for each input two vectors of weights and T broadcast activations, 2 T multiply-adds.
// Up to 1,024 inputs are summed at a time, so that a panel and the blocks of a chunk stay in L2; the sums of one pass are
// formed on their own and then added. Narrow vectors take a part of a panel at a time, with all blocks of a chunk. Included once
// per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/dense_matmul/ahead.h"
#include "kernels/dense_matmul/dense_matmul.h"
#include "kernels/dense_matmul/turned.h"
#include "kernels/epilogue_math.h"
#include "kernels/matmul.h"
#include "native/compiler.h"
#include "native/integers.h"
#include "native/team.h"

namespace {

using twofour::kDensePanel;
using twofour::Matmul;

constexpr int64_t kDenseInputs = 1024;        // inputs of one pass, at most
constexpr int64_t kDenseChunk = 640 << 10;    // bytes of packed activations beside a panel in an L2 of 1 MB
constexpr int64_t kDenseSmallWeight = 256 << 10;  // a weight that stays in L2 itself

// Where a call is cut: passes over the inputs, blocks of tokens, chunks of blocks.
template <class V>
struct DensePlan {
  static constexpr int vectors = 2, wide = vectors * V::width;
  static constexpr int most = V::width == 16 ? 14 : V::width == 8 ? 6 : 4;  // tokens of a block: registers for their sums
  int64_t passes, inputs, blocks, chunk, panels, parts;  // parts of a panel, one after the other with all blocks of a chunk

  explicit DensePlan(const Matmul& a)
      : passes(ceil_div(a.in_features, kDenseInputs)),
        inputs(ceil_div(a.in_features, passes)),
        blocks(ceil_div(a.tokens > 0 ? a.tokens : 1, most)),
        panels(ceil_div(a.out_features, kDensePanel)),
        parts(a.tokens == 1 ? 1 : kDensePanel / wide) {
    // Beside a weight that stays in L2 the chunk's answers should too; a larger one is better read seldom.
    const bool small = a.in_features * a.out_features * 4 <= kDenseSmallWeight;
    const int64_t each = (inputs + (small ? a.out_features : 0)) * most * 4;
    chunk = ceil_div(blocks, least(blocks, ceil_div(blocks * each, kDenseChunk)));  // chunks of one size
  }
  int64_t floats() const { return inputs * most; }  // of a block
  int64_t bytes() const { return round_up(chunk * floats() * 4, 64); }
  // First token of a block: all blocks are of one size or one less.
  static int64_t first(const Matmul& a, int64_t blocks, int64_t block) { return a.tokens * block / blocks; }
};

// Inputs [k, k + inputs) of `tokens` rows of x -> to[input][token].
template <class V>
inline void pack_tokens(const Matmul& a, int64_t first, int64_t tokens, int64_t k, int64_t inputs, float* to) {
  if (tokens == 1) {  // its numbers stand as they are wanted
    std::memcpy(to, x_of(a) + first * a.x_stride + k, static_cast<size_t>(inputs) * sizeof(float));
    return;
  }
  for (int64_t t = 0; t < tokens; t += V::width)
    turn_rows<V>(x_of(a) + (first + t) * a.x_stride + k, a.x_stride, least(V::width, tokens - t), inputs, to + t, tokens);
}

// One pass over the inputs of a unit.
struct DenseUnit {
  const float* x;       // the packed block
  const float* weight;  // the panel's row of the pass's first input
  int64_t inputs, token, row, rows;
  bool begins, ends;  // the first pass, which adds the bias, and the last one, after which the epilogue follows
  Ahead ahead;
};

// T tokens by `rows` of the DensePlan::wide outputs that start at row `at` of the panel.
template <class V, int T>
TWOFOUR_NOINLINE void add_block(const Matmul& a, const DenseUnit& unit, int64_t at) {
  constexpr int vectors = DensePlan<V>::vectors;
  const int64_t rows = least(DensePlan<V>::wide, unit.rows - at);
  const float *weight = unit.weight + at, *x = unit.x;
  float* y = y_of(a) + unit.token * a.y_stride + unit.row + at;
  const float* other = static_cast<const float*>(a.epilogue.other);
  if (other != nullptr) other += unit.token * a.epilogue.other_stride + unit.row + at;
  typename V::reg sums[T][vectors];
  TWOFOUR_UNROLL
  for (int t = 0; t < T; t++) {
    TWOFOUR_UNROLL
    for (int v = 0; v < vectors; v++) sums[t][v] = V::zero();
    // The answer's lines, and those of what is added to it, come while the sums are formed: stores that wait for them took
    // 13 % at 96 inputs.
    TWOFOUR_UNROLL
    for (int line = 0; line < DensePlan<V>::wide; line += 16) {
      __builtin_prefetch(y + t * a.y_stride + line, 1);
      if (other != nullptr) __builtin_prefetch(other + t * a.epilogue.other_stride + line);
    }
  }
  Ahead ahead = unit.ahead;
  for (int64_t k = unit.inputs; k > 0; k--, weight += kDensePanel, x += T) {
    ahead.fetch();
    typename V::reg w[vectors];
    TWOFOUR_UNROLL
    for (int v = 0; v < vectors; v++) w[v] = V::load_shared(weight + v * V::width);
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      const typename V::reg one = V::broadcast_shared(x + t);
      TWOFOUR_UNROLL
      for (int v = 0; v < vectors; v++) sums[t][v] = V::fma(w[v], one, sums[t][v]);
    }
  }
  TWOFOUR_UNROLL
  for (int v = 0; v < vectors; v++) {
    const int64_t left = rows - v * V::width;
    if (left <= 0) break;
    const bool biased = unit.begins && a.bias != nullptr;
    const typename V::reg bias = biased ? V::load(a.bias + unit.row + at + v * V::width, left) : V::zero();
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      float* to = y + t * a.y_stride + v * V::width;
      V::store(to, unit.begins ? sums[t][v] + bias : V::load(to, left) + sums[t][v], left);
    }
  }
  if (unit.ends && !a.epilogue.plain())
    finish_rows<V>(a.epilogue, y_of(a), a.y_stride, unit.token, T, unit.row + at, rows);
}

// One token needs as many sums at once as multiply-adds are under way: those of several panels, read side by side. Each sum
// is formed in the order that it has among other tokens. Against one panel at a time: 5 % less at 768 x 256 in an L2.
template <class V>
constexpr int kTokenPanels = V::width / 4;  // 8 vectors of sums

template <class V>
TWOFOUR_NOINLINE void add_token(const Matmul& a, const DenseUnit& unit) {
  constexpr int panels = kTokenPanels<V>, each = kDensePanel / V::width;
  const int64_t step = a.in_features * kDensePanel;
  typename V::reg sums[panels][each];
  TWOFOUR_UNROLL
  for (int i = 0; i < panels * each; i++) sums[i / each][i % each] = V::zero();
  const float *weight = unit.weight, *x = unit.x;
  for (int64_t k = unit.inputs; k > 0; k--, weight += kDensePanel, x++) {
    const typename V::reg one = V::broadcast_shared(x);
    TWOFOUR_UNROLL
    for (int p = 0; p < panels; p++) {
      TWOFOUR_UNROLL
      for (int v = 0; v < each; v++)
        sums[p][v] = V::fma(V::load_shared(weight + p * step + v * V::width), one, sums[p][v]);
    }
  }
  float* y = y_of(a) + unit.token * a.y_stride + unit.row;
  TWOFOUR_UNROLL
  for (int i = 0; i < panels * each; i++) {
    const int64_t at = i * V::width, left = unit.rows - at;
    if (left <= 0) break;
    const bool biased = unit.begins && a.bias != nullptr;
    const typename V::reg sum = sums[i / each][i % each], bias = biased ? V::load(a.bias + unit.row + at, left) : V::zero();
    V::store(y + at, unit.begins ? sum + bias : V::load(y + at, left) + sum, left);
  }
  if (unit.ends && !a.epilogue.plain())
    finish_rows<V>(a.epilogue, y_of(a), a.y_stride, unit.token, 1, unit.row, unit.rows);
}

template <class V, int T = DensePlan<V>::most>
void add_block_of(int64_t tokens, const Matmul& a, const DenseUnit& unit) {
  if (tokens == T) {
    for (int64_t at = 0; at < unit.rows; at += DensePlan<V>::wide) add_block<V, T>(a, unit, at);
    return;
  }
  if constexpr (T > 1) add_block_of<V, T - 1>(tokens, a, unit);
}

template <class V>
int64_t dense_panels_workspace(const Matmul& a) {
  return DensePlan<V>(a).bytes();
}

// One pass over the inputs for a chunk of blocks, which its units are cut from: the blocks of a panel's part one after the other.
template <class V>
struct DensePass {
  using Plan = DensePlan<V>;
  const Matmul& a;
  const Plan& plan;
  float* packed;
  int64_t first, count, k, inputs;  // blocks, inputs

  int64_t token(int64_t block) const { return Plan::first(a, plan.blocks, first + block); }
  int64_t each() const { return plan.parts * count; }  // units of a panel
  const float* panel(int64_t index) const {
    return static_cast<const float*>(a.weight) + (index * a.in_features + k) * kDensePanel;
  }

  void pack(int64_t begin, int64_t end) const {
    for (int64_t b = begin; b < end; b++) {
      if (k == 0 && a.rows_wanted) a.rows_wanted(a.wanted_state, token(b), token(b + 1));  // later passes share blocks alike
      pack_tokens<V>(a, token(b), token(b + 1) - token(b), k, inputs, packed + b * plan.floats());
    }
  }
  void multiply(int64_t begin, int64_t end) const {
    for (int64_t done = begin, taken = 1; done < end; done += taken) {
      taken = a.tokens == 1 && end - done >= kTokenPanels<V> ? kTokenPanels<V> : 1;
      const int64_t u = a.upwards ? begin + end - done - taken : done;
      const int64_t at = u / each(), part = u % each() / count, b = u % count, row = at * kDensePanel + part * Plan::wide;
      const int64_t rows = least(taken * kDensePanel / plan.parts, a.out_features - row), next = a.upwards ? at - 1 : at + 1;
      DenseUnit unit{packed + b * plan.floats(), panel(at) + part * Plan::wide, inputs, token(b), row, rows, k == 0,
                     k + inputs == a.in_features, {}};
      const bool follows = begin / each() <= next && next * each() < end;
      unit.ahead = Ahead::of(follows ? panel(next) : nullptr, u % each(), each(), inputs);
      if (taken > 1) add_token<V>(a, unit);
      else add_block_of<V>(token(b + 1) - token(b), a, unit);
    }
  }
};

// The members pack the blocks of a chunk together, then share its units.
template <class V>
void dense_panels(const Matmul& a) {
  if (a.tokens <= 0) return;
  const DensePlan<V> plan(a);
  with_team(a.threads, [&](const Team& team) {
    bool reading = false;
    for (int64_t b0 = 0; b0 < plan.blocks; b0 += plan.chunk) {
      const int64_t count = least(plan.chunk, plan.blocks - b0);
      int64_t begin, end;
      for (int64_t k = 0; k < a.in_features; k += plan.inputs) {
        const DensePass<V> pass{a, plan, static_cast<float*>(a.workspace), b0, count, k, least(plan.inputs, a.in_features - k)};
        if (reading) team.barrier();
        team.share(count, 1, &begin, &end);
        pass.pack(begin, end);
        team.barrier();
        reading = true;
        team.share(plan.panels * pass.each(), 1, &begin, &end);
        pass.multiply(begin, end);
      }
      if (a.rows_done) {
        const int64_t token = DensePlan<V>::first(a, plan.blocks, b0), next = DensePlan<V>::first(a, plan.blocks, b0 + count);
        team.barrier();
        team.share(next - token, 1, &begin, &end);
        if (begin < end) a.rows_done(a.rows_state, token + begin, token + end);
      }
    }
  });
}

}  // namespace
