// Few tokens: vectors hold dwords of weights as they stand in memory, 16 / S steps of S rows, and the inputs are spread
// beside them. The weights are one stream that is read once for up to four tokens.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>

#include "blocks.h"
#include "fetch.h"
#include "kernels/damaged.h"
#include "native/team.h"
#include "shapes.h"
#include "tokens.h"
#include "windows.h"

namespace {

constexpr int kFewTokens = 4;  // tokens of a piece, at most

// A strip of S rows and runs of U dwords (0: inputs apart, those of bytes brought side by side before) against T tokens whose
// rows are `stride` bytes apart.
template <class D, int S, int U, int T>
struct Strip {
  using V = typename D::V;
  using Sum = typename D::Sum;
  static constexpr int width = V::width;
  static constexpr int vectors = S > width ? S / width : 1;  // of sums
  static constexpr int steps = width > S ? width / S : 1;    // of a vector
  static constexpr int all = kBlockUnit / S;                 // of the 16 dwords that are taken at once
  static constexpr bool apart = U == 0 && D::per == 2, beside = U == 0 && D::per == 4;
  static constexpr int taken = apart ? D::per * all : U < all ? all / (U > 0 ? U : 1) : 1;  // indices of 16 dwords
  static constexpr int turns = apart || U <= all ? 1 : U / all;                             // 16 dwords of an index
  // Sums of their own for 16 dwords in a row, so that they do not wait for each other.
  static constexpr int sets = vectors * T >= 4 ? 1 : 4 / (vectors * T);

  Sum sums[sets][vectors][T] = {};

  // 16 dwords of weights; `x` is moved on by the turns of an index, or where no index is needed.
  TWOFOUR_INLINE void add(int set, const char* w, const char* x, int64_t stride, const uint16_t* index) {
    TWOFOUR_UNROLL
    for (int v = 0; v < kBlockUnit / width; v++) {
      const auto weights = V::load_aligned(reinterpret_cast<const float*>(w) + v * width);
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) {
        Sum& sum = sums[set][v % vectors][t];
        sum = D::dot(sum, inputs(v * width / S, x + t * stride, index), weights);
      }
    }
  }
  // The dwords of `steps` steps from `step` of the 16 on, each S times.
  static TWOFOUR_INLINE typename V::reg inputs(int step, const char* x, const uint16_t* index) {
    if constexpr (beside) {
      return spread<V, S>(x + step * 4);
    } else if constexpr (apart) {
      return gather_pairs<V, S>([&](int i) { return x + index[step * D::per + i] * 2; });
    } else {
      const auto at = [&](int k) { return x + (index[(step + k) / U] + (step + k) % U) * 4; };
      if constexpr (U >= steps) return spread<V, S>(at(0));
      typename V::reg found;
      gather<V, S, 0>(found, at);
      return found;
    }
  }

  TWOFOUR_INLINE void run(const char* w, const uint16_t* index, int64_t count, const char* x, int64_t stride) {
    constexpr int unit = kBlockUnit * 4;
    if constexpr (beside) {
      constexpr int inputs = all * 4;  // bytes of them beside 16 dwords of weights
      int64_t i = 0;
      for (; i + sets * inputs <= count; i += sets * inputs, w += sets * unit, x += sets * inputs) {
        TWOFOUR_UNROLL
        for (int g = 0; g < sets; g++) add(g, w + g * unit, x + g * inputs, stride, nullptr);
      }
      for (; i < count; i += inputs, w += unit, x += inputs) add(0, w, x, stride, nullptr);
    } else if constexpr (turns > 1) {
      for (int64_t i = 0; i < count; i++, w += turns * unit) {
        TWOFOUR_UNROLL
        for (int g = 0; g < turns; g++) add(g % sets, w + g * unit, x + g * all * 4, stride, index + i);
      }
    } else {
      int64_t i = 0;
      for (; i + sets * taken <= count; i += sets * taken, w += sets * unit) {
        TWOFOUR_UNROLL
        for (int g = 0; g < sets; g++) add(g, w + g * unit, x, stride, index + i + g * taken);
      }
      for (; i < count; i += taken, w += unit) add(0, w, x, stride, index + i);
    }
    TWOFOUR_UNROLL
    for (int s = 1; s < sets; s++) {
      TWOFOUR_UNROLL
      for (int v = 0; v < vectors; v++) {
        TWOFOUR_UNROLL
        for (int t = 0; t < T; t++) sums[0][v][t] = D::add(sums[0][v][t], sums[s][v][t]);
      }
    }
  }
};

// Sums of strips whose vectors hold several steps, [strip][T] -> one vector: lane s S + r is row r of strip s.
template <class D, int S, int count, int T>
TWOFOUR_INLINE typename D::Sum folded(const typename D::Sum* strips) {
  using V = typename D::V;
  using Sum = typename D::Sum;
  if constexpr (count == 1) {
    return strips[0];
  } else {
    Sum half[count / 2];
    TWOFOUR_UNROLL
    for (int i = 0; i < count / 2; i++) {
      constexpr int lanes = S * count / 2;
      constexpr auto all = std::make_integer_sequence<int, V::width>{};
      const auto a = (typename V::reg)strips[2 * i * T], b = (typename V::reg)strips[(2 * i + 1) * T];
      half[i] = D::add((Sum)every_other<V, lanes, 0>(a, b, all), (Sum)every_other<V, lanes, 1>(a, b, all));
    }
    return folded<D, S, count / 2, 1>(half);
  }
}

// The rows of a unit for T tokens from `first` on, of inputs brought side by side those of x[T][strips].
template <class D, int S, int U, int T>
TWOFOUR_NOINLINE void unit_rows(const Matmul& a, const Blocks& b, int64_t unit, const char* x, int64_t stride,
                                const typename D::Token* kept, int64_t first) {
  using One = Strip<D, S, U, T>;
  using Sum = typename D::Sum;
  constexpr int strips = kBlockUnit / S, width = One::width, together = width > S ? width / S : 1;
  const int64_t each = One::beside ? kept_bytes_of(b.shape) : 0, run = U == 0 ? 0 : b.shape.run;
  Sum answer[kBlockUnit / width * T], parts[together * T];
  for (int j = 0; j < strips; j++) {
    const int64_t s = unit * strips + j, begin = b.starts[s];
    One strip;
    const int64_t steps = U == 0 ? begin / D::per : begin * run;
    strip.run(b.weights + steps * S * 4, b.indices + begin, b.starts[s + 1] - begin, x + j * each, stride);
    if constexpr (together == 1) {
      TWOFOUR_UNROLL
      for (int v = 0; v < One::vectors; v++) {
        TWOFOUR_UNROLL
        for (int t = 0; t < T; t++) answer[(j * One::vectors + v) * T + t] = strip.sums[0][v][t];
      }
    } else {
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) parts[j % together * T + t] = strip.sums[0][0][t];
      if (j % together == together - 1) {
        TWOFOUR_UNROLL
        for (int t = 0; t < T; t++)
          answer[j / together * T + t] = folded<D, S, together, T>(parts + t);
      }
    }
  }
  b.finish<D>(a, answer, kept, first, T, unit);
}

template <class D, int S, int U>
void unit_rows_of(int64_t tokens, const Matmul& a, const Blocks& b, int64_t unit, const char* x, int64_t stride,
                  const typename D::Token* kept, int64_t first, char* scratch) {
  while (tokens > 0) {
    const int64_t piece = tokens >= kFewTokens ? kFewTokens : tokens >= 2 ? 2 : 1;
    const auto run = piece == 4 ? unit_rows<D, S, U, 4> : piece == 2 ? unit_rows<D, S, U, 2> : unit_rows<D, S, U, 1>;
    if constexpr (Strip<D, S, U, 1>::beside) {
      keep_unit<S>(b, unit, x, stride, piece, scratch);
      run(a, b, unit, scratch, kBlockUnit / S * kept_bytes_of(b.shape), kept, first);
    } else {
      run(a, b, unit, x, stride, kept, first);
    }
    tokens -= piece, first += piece, x += piece * stride, kept += piece;
  }
}

template <class D>
struct RowsPlan {
  int64_t token_bytes, per_pass, kept_bytes, scratch_bytes;

  RowsPlan(const Matmul& a, const Blocks& b)
      : token_bytes(b.shape.token_bytes()),
        per_pass(least(a.tokens, round_up(half_second_level() / token_bytes + 1, kFewTokens))),
        kept_bytes(round_up(a.tokens * static_cast<int64_t>(sizeof(typename D::Token)), 64)),
        scratch_bytes(b.shape.windowed() ? least(a.tokens, kFewTokens) * b.per_unit() * kept_bytes_of(b.shape) : 0) {}
  int64_t scratch_at() const { return kept_bytes + per_pass * token_bytes; }
  int64_t bytes(int threads) const { return scratch_at() + (threads > 1 ? threads : 1) * scratch_bytes; }
};

template <class D>
int64_t block_rows_workspace(const Matmul& a) {
  return a.tokens > 0 ? RowsPlan<D>(a, Blocks(a.weight, a.out_features, a.in_features, 4 / D::per)).bytes(a.threads) : 0;
}

template <class D>
void block_rows(const Matmul& a) {
  if (a.tokens <= 0) return;
  const Blocks b(a.weight, a.out_features, a.in_features, 4 / D::per);
  const RowsPlan<D> plan(a, b);
  auto* kept = static_cast<typename D::Token*>(a.workspace);
  char* x = static_cast<char*>(a.workspace) + plan.kept_bytes;
  with_team(a.threads, [&](const Team& team) {
    int64_t u0, u1;
    team.share(b.shape.units, 1, &u0, &u1);
    char* scratch = static_cast<char*>(a.workspace) + plan.scratch_at() + team.me * plan.scratch_bytes;
    const bool sound = b.sound(u0, u1);
    if (!sound) report(a.damaged);
    for (int64_t pass = 0; pass < a.tokens; pass += plan.per_pass) {
      const int64_t count = least(plan.per_pass, a.tokens - pass);
      if (pass > 0) team.barrier();  // the last tokens are still being read
      for (int64_t t = team.me; t < count; t += team.size)
        token_row<D>(a, b, pass + t, x + t * plan.token_bytes, kept + pass + t);
      team.barrier();
      if (!sound) continue;
      with_shape<D>(b.shape, [&](auto strip, auto run) {
        for (int64_t u = u0; u < u1; u++)
          unit_rows_of<D, strip.value, run.value>(count, a, b, a.upwards ? u0 + u1 - u - 1 : u, x, plan.token_bytes,
                                                  kept + pass, pass, scratch);
      });
    }
  });
}

}  // namespace
