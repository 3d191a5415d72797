// TransposePipeline: x transposed into panels and sums transposed into y, a square of V::width tokens at a time.
//
//     x (tokens, in)        panel: one row per input         sums: one row per output        y (tokens, out)
//        k0 k1 k2 ..             t0 t1 t2 ..                    t0 t1 t2 ..                     m0 m1 m2 ..
//     t0  a  b  c   pack     k0   a  d  .        multiply    m0   p  q  .          store     t0  p  r  .
//     t1  d  .  .   ---->    k1   b  .  .        ------->    m1   r  .  .          ---->     t1  q  .  .
//     t2  .  .  .            k2   c  .  .                    m2   .  .  .                    t2  .  .  .
//
// Packing and storing miss the caches and multiplying does not. So both are queued, and a product calls `step` after
// each pair of rows, which packs or stores one square: the misses pass behind multiply-adds. The next tile is packed
// while this one is multiplied; the rows of a block are stored while those after it are multiplied:
//
//     multiply   tile 0 | tile 1       | ... | last tile, rows 0..95 | last tile, rows 96..191 | ...
//     pack       tile 1 | tile 2       | ... |                       |
//     store             |              | ... |                       | rows 0..95              | rows 96..191
//
// Included once per instruction-set file, with V the vector type of that file; everything has internal linkage.
#pragma once

#include <cstdint>

#include "kernels/layouts/panels.h"
#include "kernels/epilogue_math.h"
#include "kernels/matmul.h"
#include "kernels/panel_steps.h"
#include "native/compiler.h"
#include "native/integers.h"

namespace {

using twofour::kPanelTile;
using twofour::Matmul;

TWOFOUR_INLINE float* floats_at(void* base, int64_t bytes) {
  return reinterpret_cast<float*>(static_cast<char*>(base) + bytes);
}
TWOFOUR_INLINE int64_t panel_tiles(const Matmul& a) { return (a.in_features + kPanelTile - 1) / kPanelTile; }

// One W x W corner of x, transposed to panel rows; `tokens` and `inputs` of it exist, the rest becomes zero.
template <class V, bool whole>
TWOFOUR_INLINE void pack_square(const float* x, int64_t x_stride, int64_t tokens, int64_t inputs, float* panel,
                                int64_t stride) {
  typename V::reg t[V::width];
  TWOFOUR_UNROLL
  for (int i = 0; i < V::width; i++) {
    if (whole) t[i] = V::load_unaligned(x + i * x_stride);
    else t[i] = i < tokens && inputs > 0 ? V::load_partial(x + i * x_stride, least(inputs, V::width)) : V::zero();
  }
  V::transpose(t);
  TWOFOUR_UNROLL
  for (int i = 0; i < V::width; i++) V::store_aligned(panel + i * stride, t[i]);
}

// One W x W corner of the sums, transposed to rows of y; `tokens` and `rows` of it exist.
template <class V, bool whole>
TWOFOUR_INLINE void store_square(const float* sums, int64_t stride, typename V::reg bias, int64_t tokens, int64_t rows,
                                  float* y, int64_t y_stride) {
  typename V::reg t[V::width];
  TWOFOUR_UNROLL
  for (int i = 0; i < V::width; i++) t[i] = whole || i < rows ? V::load_aligned(sums + i * stride) : V::zero();
  V::transpose(t);
  TWOFOUR_UNROLL
  for (int i = 0; i < V::width; i++) {
    if (whole) V::store_unaligned(y + i * y_stride, t[i] + bias);
    else if (i < tokens) V::store_partial(y + i * y_stride, t[i] + bias, least(rows, V::width));
  }
}

// Inputs [k, k + width) of x that stands as (inputs, tokens): panel rows as they are.
template <class V>
TWOFOUR_INLINE void copy_square(const float* x, int64_t x_stride, int64_t tokens, int64_t inputs, float* panel,
                                int64_t stride) {
  TWOFOUR_UNROLL
  for (int i = 0; i < V::width; i++) {
    const float* row = x + i * x_stride;
    if (i >= inputs) V::store_aligned(panel + i * stride, V::zero());
    else if (tokens >= V::width) V::store_aligned(panel + i * stride, V::load_unaligned(row));
    else V::store_aligned(panel + i * stride, V::load_partial(row, tokens));
  }
}

// A panel: `used` vectors of tokens from `first` on, its rows kept in `panel`, its sums in `sums`.
struct Panel {
  int64_t first;
  int used;
  float* panel;
  float* sums;
};

// SquareQueue of a panel that wait to be moved: rows or inputs [begin, end) of each vector of tokens in turn. Runs along x
// and y of 64 to 96 numbers keep the streams of memory few: a square of every vector in turn was 5 % slower.
struct SquareQueue {
  int64_t begin = 0, end = 0, at = 0;
  int vector = 0, vectors = 0;

  TWOFOUR_INLINE bool any() const { return vector < vectors; }
  TWOFOUR_INLINE void next(int64_t width) {
    at += width;
    if (at >= end) at = begin, vector++;
  }
};

constexpr int64_t kStoreRows = 96;  // rows that are queued at once to be stored

// One panel's queues: x to be packed into it, and the final sums of rows [row, row + rows) of the output to be stored in
// y, with bias and epilogue.
template <class V>
struct TransposePipeline {
  const Matmul& a;
  Panel panel;
  int64_t row = 0, rows = 0;
  SquareQueue in{}, out{};

  int64_t stride() const { return panel_stride(panel.used) * V::width; }

  // Inputs [begin, end) of x are read from the panel next.
  void enqueue_pack(int64_t begin, int64_t end) {
    if (begin < end) in = {begin, end, begin, 0, panel.used};
  }
  // The sums of the first `count` rows are final; those queued before are stored first.
  void enqueue_store(int64_t count) {
    while (out.any()) store();
    if (out.end < count) out = {out.end, count, out.end, 0, panel.used};
  }
  TWOFOUR_INLINE void step() {
    if (in.any()) pack();
    else if (out.any()) store();
  }
  void finish() {
    while (in.any()) pack();
    while (out.any()) store();
  }
  // Fetches the lines of the square after next: 3 % over none.
  TWOFOUR_INLINE void fetch(SquareQueue queue, const float* matrix, int64_t stride) const {
    queue.next(V::width);
    queue.next(V::width);
    if (!queue.any()) return;
    const int64_t token = panel.first + queue.vector * V::width;
    const float* corner = a.columns ? matrix + queue.at * stride + token : matrix + token * stride + queue.at;
    for (int i = 0; i < V::width; i++) __builtin_prefetch(corner + i * stride);
  }

  TWOFOUR_NOINLINE void pack() {
    const bool more = a.more != nullptr && in.at >= a.split;
    if (!more) fetch(in, x_of(a), a.x_stride);  // the others were written just now
    const int64_t token = panel.first + in.vector * V::width, tokens = a.tokens - token, inputs = a.in_features - in.at;
    float* to = panel.panel + in.at * stride() + in.vector * V::width;
    const float* from = a.columns ? x_of(a) + in.at * a.x_stride + token : input_at(a, token, in.at);
    const int64_t step = more ? a.more_stride : a.x_stride;
    if (a.columns) copy_square<V>(from, step, tokens, inputs, to, stride());
    else if (tokens >= V::width && inputs >= V::width) pack_square<V, true>(from, step, tokens, inputs, to, stride());
    else pack_square<V, false>(from, step, tokens, inputs, to, stride());
    in.next(V::width);
  }
  TWOFOUR_NOINLINE void store() {
    if (a.columns) return store_rows();
    fetch(out, y_of(a) + row, a.y_stride);
    const int64_t token = panel.first + out.vector * V::width, m = row + out.at;
    const int64_t tokens = least(a.tokens - token, V::width), left = least(rows - out.at, V::width);
    const float* from = panel.sums + out.at * stride() + out.vector * V::width;
    float* to = y_of(a) + token * a.y_stride + m;
    const auto bias = a.bias == nullptr ? V::zero() : V::load_partial(a.bias + m, left);
    if (tokens == V::width && left == V::width)
      store_square<V, true>(from, stride(), bias, tokens, left, to, a.y_stride);
    else store_square<V, false>(from, stride(), bias, tokens, left, to, a.y_stride);
    if (!a.epilogue.plain()) finish_rows<V>(a.epilogue, y_of(a), a.y_stride, token, tokens, m, left);
    out.next(V::width);
  }
  // The same into a y that stands as (outputs, tokens).
  TWOFOUR_INLINE void store_rows() {
    fetch(out, y_of(a) + row * a.y_stride, a.y_stride);
    const int64_t token = panel.first + out.vector * V::width, tokens = a.tokens - token;
    const int64_t left = least(rows - out.at, V::width);
    const float* from = panel.sums + out.at * stride() + out.vector * V::width;
    float* to = y_of(a) + (row + out.at) * a.y_stride + token;
    for (int64_t i = 0; i < left; i++) {
      if (tokens >= V::width) V::store_unaligned(to + i * a.y_stride, V::load_aligned(from + i * stride()));
      else V::store_partial(to + i * a.y_stride, V::load_aligned(from + i * stride()), tokens);
    }
    out.next(V::width);
  }
};

}  // namespace
