// Design C, row-vectorised: vectors hold output rows, the activation is permuted in the register.
//
// The four inputs of a group are broadcast and each row picks its own by the low bits of its metadata; the next group's
// index is a shift, because the permutes ignore the bits above. The weights are one stream that is read once, which is
// what few tokens are limited by. G says how a group is multiplied: as floats here, as pairs in avx512_bf16.cc.
// Included once per instruction-set file; everything has internal linkage.
#pragma once

#include <cstring>

#include "inputs.h"
#include "kernels/layouts/rows.h"
#include "kernels/row_shape.h"

namespace {

using twofour::kBf16HalfBytes;
using twofour::kRowTile;
using twofour::kRowUnit;

constexpr int64_t kRowWorkspace = 512 * 1024;  // copied activations per pass over the weights: half of a small L2
constexpr int64_t kRowGroups = kRowTile / 4;     // groups of inputs in a unit

using FetchTwice = FetchNearAndFar<1024>;

// Groups as floats: two permutes and two multiply-adds. Activations are pieces of four floats.
template <class Vector>
struct FloatGroups {
  using V = Vector;
  static constexpr int64_t piece = 16;
  struct Index {
    typename V::ireg first, second;
  };
  struct Weights {
    typename V::reg first, second;
  };
  using Inputs = typename V::reg;

  static TWOFOUR_INLINE Index load_index(const char* p) {
    const auto both = V::load_index(p);
    return {both, V::template shift_right<16>(both)};
  }
  static TWOFOUR_INLINE Index next(Index i) {
    return {V::template shift_right<2>(i.first), V::template shift_right<2>(i.second)};
  }
  static TWOFOUR_INLINE Weights load_weights(const char* p) {
    const auto both = V::load_index(p);
    return {V::lower(both), V::upper(both)};
  }
  static TWOFOUR_INLINE Inputs broadcast(const char* p) { return V::broadcast4(reinterpret_cast<const float*>(p)); }
  static TWOFOUR_INLINE void add(int, Inputs x, Index i, Weights w, typename V::reg& a, typename V::reg& b) {
    a = V::fma(w.first, V::permute4(x, i.first), a);
    b = V::fma(w.second, V::permute4(x, i.second), b);
  }
  static TWOFOUR_INLINE void write(char* to, typename V::reg x) { V::store_unaligned(reinterpret_cast<float*>(to), x); }
};

// One unit (16 * Halves rows x 32 inputs) against T tokens; x is [group][token]. Two sets of sums where registers
// allow, so that few tokens are not bound by the latency of the products.
template <class G, class Fetch, int T, int Halves, int Sets>
TWOFOUR_INLINE void add_unit(const char* unit, const char* x,
                             typename G::V::reg (&acc)[Sets][Halves * (kRowUnit / G::V::width)][T]) {
  using V = typename G::V;
  constexpr int per_half = kRowUnit / V::width;
  constexpr int vectors = Halves * per_half;
  typename G::Index index[vectors];
  const char* values[vectors];
  TWOFOUR_UNROLL
  for (int v = 0; v < vectors; v++) {
    const char* half = unit + v / per_half * kBf16HalfBytes + v % per_half * V::width * 4;
    index[v] = G::load_index(half);
    Fetch::template fetch<V>(half, 0);
    values[v] = half + kRowUnit * 4;
  }
  TWOFOUR_UNROLL
  for (int g = 0; g < kRowGroups; g++) {
    typename G::Weights w[vectors];
    TWOFOUR_UNROLL
    for (int v = 0; v < vectors; v++) {
      const char* at = values[v] + g * kRowUnit * 4;
      w[v] = G::load_weights(at);
      Fetch::template fetch<V>(at, 0);
    }
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      const typename G::Inputs four = G::broadcast(x + (g * T + t) * G::piece);
      TWOFOUR_UNROLL
      for (int v = 0; v < vectors; v++) G::add(g, four, index[v], w[v], acc[0][v][t], acc[Sets - 1][v][t]);
    }
    TWOFOUR_UNROLL
    for (int v = 0; v < vectors; v++) index[v] = G::next(index[v]);
  }
}

// Rows [row, row + 16 * Halves) of T tokens from `first` on.
template <class G, class Fetch, int T, int Halves>
TWOFOUR_NOINLINE void row_unit(const Matmul& a, const char* unit, const char* x, int64_t first, int64_t row) {
  using V = typename G::V;
  constexpr int strips = Fetch::in_order ? Halves : 1;  // of rows that are read one after the other
  constexpr int vectors = Halves / strips * (kRowUnit / V::width);
  constexpr int Sets = strips * vectors * T * 2 <= V::sums ? 2 : 1;
  typename V::reg acc[strips][Sets][vectors][T] = {};
  for (int64_t k = ceil_div(a.in_features, kRowTile); k > 0; k--) {
    TWOFOUR_UNROLL
    for (int s = 0; s < strips; s++) add_unit<G, Fetch, T, Halves / strips, Sets>(unit + s * kBf16HalfBytes, x, acc[s]);
    unit += 2 * kBf16HalfBytes;
    x += kRowGroups * T * G::piece;
  }
  TWOFOUR_UNROLL
  for (int i = 0; i < strips * vectors; i++) {
    const int s = i / vectors, v = i % vectors;
    const int64_t m = row + i * V::width, rows = least(V::width, a.out_features - m);
    if (rows <= 0) continue;
    const typename V::reg bias = bias_of<V>(a, m, rows);
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      typename V::reg sum = acc[s][0][v][t];
      if (Sets == 2) sum = sum + acc[s][Sets - 1][v][t];
      store_outputs<V>(a, first + t, m, rows, sum + bias);
    }
  }
}

// Unit u (32 rows) for `tokens` <= T.
template <class G, class Fetch, int T>
void row_unit_of(int64_t tokens, const Matmul& a, const char* x, int64_t first, int64_t u) {
  constexpr int Halves = Fetch::in_order ? 2 : kRowHalves<typename G::V>;
  if (tokens == T) {
    const int64_t unit_bytes = ceil_div(a.in_features, kRowTile) * 2 * kBf16HalfBytes;
    const char* unit = static_cast<const char*>(a.weight) + u * unit_bytes;
    for (int h = 0; h < 2; h += Halves)
      row_unit<G, Fetch, T, Halves>(a, unit + h * kBf16HalfBytes, x, first, (2 * u + h) * kRowUnit);
    return;
  }
  if constexpr (T > 1) row_unit_of<G, Fetch, T - 1>(tokens, a, x, first, u);
}

// Tokens [first, first + tokens) -> x[group][token], rounded to bfloat16, zero past in_features. Reading rows of x in
// place would put tokens into one L1 set when in_features is a multiple of 1024.
template <class G>
TWOFOUR_NOINLINE void copy_tokens(const Matmul& a, int64_t first, int64_t tokens, char* to) {
  using V = typename G::V;
  const int64_t inputs = ceil_div(a.in_features, kRowTile) * kRowTile;
  alignas(64) char pieces[V::width / 4 * 16];
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t k = 0; k < inputs; k += V::width) {
      const int64_t left = a.in_features - k;
      const char* from = inputs_at(a, a.x_type, first + t, k).x;
      G::write(pieces, left > 0 ? load_rounded<V>(from, a.x_type, left) : V::zero());
      TWOFOUR_UNROLL
      for (int i = 0; i < V::width / 4; i++)
        std::memcpy(to + ((k / 4 + i) * tokens + t) * G::piece, pieces + i * G::piece, G::piece);
    }
}

// Pieces of at most kRowTokens<V> tokens, evenly filled, as many per pass over the weights as fit kRowWorkspace.
template <class G>
struct RowPlan {
  int64_t all, bytes, pieces;

  explicit RowPlan(const Matmul& a) {
    all = ceil_div(a.tokens, kRowTokens<typename G::V>);
    bytes = ceil_div(a.in_features, kRowTile) * kRowGroups * kRowTokens<typename G::V> * G::piece;
    pieces = least(all, kRowWorkspace / bytes > 0 ? kRowWorkspace / bytes : 1);
  }
  int64_t begin(const Matmul& a, int64_t p) const { return a.tokens * p / all; }
};

template <class G>
int64_t row_blocks_workspace(const Matmul& a) {
  const RowPlan<G> plan(a);
  return plan.pieces * plan.bytes;
}

template <class G, class Fetch>
void row_blocks(const Matmul& a) {
  if (a.tokens <= 0) return;
  const RowPlan<G> plan(a);
  char* x = static_cast<char*>(a.workspace);
  with_team(a.threads, [&](const Team& team) {
    int64_t u0, u1;
    team.share(ceil_div(a.out_features, 2 * kRowUnit), 1, &u0, &u1);
    for (int64_t p0 = 0; p0 < plan.all; p0 += plan.pieces) {
      const int64_t p1 = least(p0 + plan.pieces, plan.all);
      if (p0 > 0) team.barrier();  // the last pieces are still being read
      for (int64_t p = p0 + team.me; p < p1; p += team.size)
        copy_tokens<G>(a, plan.begin(a, p), plan.begin(a, p + 1) - plan.begin(a, p), x + (p - p0) * plan.bytes);
      team.barrier();
      for (int64_t u = u0; u < u1; u++)
        for (int64_t p = p0; p < p1; p++) {
          const int64_t first = plan.begin(a, p), tokens = plan.begin(a, p + 1) - first;
          row_unit_of<G, Fetch, kRowTokens<typename G::V>>(tokens, a, x + (p - p0) * plan.bytes, first, u);
        }
    }
  });
}

}  // namespace
