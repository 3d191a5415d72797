// Gradients of attention for Python.
#include <algorithm>
#include <atomic>
#include <new>

#include "gradient.h"
#include "heads.h"
#include "native/binding.h"
#include "native/integers.h"
#include "native/parallel.h"
#include "native/scratch.h"
#include "native/unlocked.h"

namespace twofour {
namespace {

constexpr AttentionGradientKernel kKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "attention_gradient", __VA_ARGS__}, symbol##__workspace, symbol},
#include "gradient.inc"
#undef TWOFOUR_ROW
};

bool alike(const Heads& a, const Heads& b) {
  return a.batch == b.batch && a.heads == b.heads && a.rows == b.rows && a.width == b.width;
}

// A tensor that is written, of the shape of what it is the gradient of.
Heads answer(const Border& border, const Operand& operand, const char* role, Types types, const Heads& of) {
  const Heads found = heads(border, operand, role, types);
  border.require(alike(found, of) && is_apart(found), operand, role, "the shape of its operand, no number twice in memory");
  return found;
}

void run(const AttentionGradientKernel& kernel, const AttentionGradient& args, int threads) {
  static Scratch scratch;
  const int64_t count = args.of.batch * args.of.heads, members = std::max<int64_t>(1, std::min<int64_t>(count, threads));
  if (count == 0) return;
  const Unlocked unlocked;
  const int64_t each = round_up(kernel.workspace_bytes(args), 64);
  const Scratch::Lease lease(scratch, workspace_of(each, members));
  std::atomic<int64_t> next{0};
  parallel_for(count, 1, threads, [&](int64_t begin, int64_t end) {
    kernel.run(args, begin, end, static_cast<char*>(lease.data()) + each * next.fetch_add(1));
  });
}

}  // namespace

void bind_attention_gradient(nb::module_& m) {
  bind_table(m, kKernels);
  // Tensors of four axes, as in gradient.h; `mask` as of attention; dq, dk and dv are written.
  m.def("attention_gradient", [](int index, const Operand& q, const Operand& k, const Operand& v, const Operand& upstream,
                                 const Operand& dq, const Operand& dk, const Operand& dv, const Operand& mask, float scale,
                                 bool causal, int64_t drop_below, int64_t drop_seed, int threads) {
    const AttentionGradientKernel& kernel = row(kKernels, index);
    const Border border(kernel.name);
    const Types types = types_of(kernel);
    const Heads queries = heads(border, q, "queries", types), keys = heads(border, k, "keys", types);
    const Heads values = heads(border, v, "values", types), dout = heads(border, upstream, "gradient of the answer", types);
    border.require(alike(keys, {nullptr, {}, queries.batch, queries.heads, keys.rows, queries.width}) && keys.width > 0, k,
                   "keys", "the queries' batch, heads and width");
    border.require(alike(values, {nullptr, {}, queries.batch, queries.heads, keys.rows, values.width}), v, "values",
                   "a row for each key");
    border.require(alike(dout, {nullptr, {}, queries.batch, queries.heads, queries.rows, values.width}), upstream,
                   "gradient of the answer", "(batch, heads, queries, value width)");
    const Heads to_q = answer(border, dq, "gradient of the queries", types, queries);
    const Heads to_k = answer(border, dk, "gradient of the keys", types, keys);
    const Heads to_v = answer(border, dv, "gradient of the values", types, values);
    AttentionGradient args{
        {queries.data, keys.data, values.data, nullptr, queries.strides, keys.strides, values.strides, {}, nullptr,
         AttentionMask::none, {}, queries.batch, queries.heads, queries.heads, queries.rows, keys.rows, queries.width,
         values.width, scale, causal, 0.0f, nullptr, nullptr, {}, {}, keys.rows},
        dout.data, dout.strides, to_q.data, to_k.data, to_v.data, to_q.strides, to_k.strides, to_v.strides};
    add_dropout(border, q, drop_below, drop_seed, &args.of);
    if (queries.rows > 0 && keys.rows > 0) add_mask(border, mask, &args.of);
    run(kernel, args, threads);
  });
}

}  // namespace twofour
