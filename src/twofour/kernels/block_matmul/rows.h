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

constexpr int kFewTokens = 4;      // tokens of a piece, at most
constexpr int kUnitsTogether = 8;  // units whose answers leave at once: of few blocks, leaving takes longer than the product

constexpr const uint16_t* kNoIndex = nullptr;

// Indices from `first` on of four that one load brings: strips of 8 rows took five loads for 64 bytes of weights, and with
// three and a half they take 0.83 to 0.93 of the time (Zen 4, one token, weights in L2 or L3).
struct FourIndices {
  uint64_t four;
  int first;
  TWOFOUR_INLINE FourIndices(const uint16_t* from, int skipped) : first(skipped) { std::memcpy(&four, from, 8); }
  TWOFOUR_INLINE uint64_t operator[](int i) const { return four >> 16 * (first + i) & 0xffff; }
};

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
  template <class Index>
  TWOFOUR_INLINE void add(int set, const char* w, const char* x, int64_t stride, const Index& index) {
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
  // The indices of the 16 dwords of a set.
  static TWOFOUR_INLINE auto indices_of(const uint16_t* index, int set) {
    if constexpr (sets * taken % 4 == 0 && taken <= 4) return FourIndices(index + set * taken / 4 * 4, set * taken % 4);
    else return index + set * taken;
  }
  // The dwords of `steps` steps from `step` of the 16 on, each S times.
  template <class Index>
  static TWOFOUR_INLINE typename V::reg inputs(int step, const char* x, const Index& index) {
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

  // `left`: indices of the layout from the strip's first one on.
  TWOFOUR_INLINE void run(const char* w, const uint16_t* index, int64_t count, int64_t left, const char* x, int64_t stride) {
    constexpr int unit = kBlockUnit * 4;
    if constexpr (beside) {
      constexpr int inputs = all * 4;  // bytes of them beside 16 dwords of weights
      // Weights of the strip behind, times the zeros that stand behind these inputs, take less time than a loop over the
      // rest, whose length no processor foretells.
      if (const int64_t whole = round_up(count, sets * inputs); sets * inputs <= kZerosBehind && whole <= left) count = whole;
      int64_t i = 0;
      for (; i + sets * inputs <= count; i += sets * inputs, w += sets * unit, x += sets * inputs) {
        TWOFOUR_UNROLL
        for (int g = 0; g < sets; g++) add(g, w + g * unit, x + g * inputs, stride, kNoIndex);
      }
      for (; i < count; i += inputs, w += unit, x += inputs) add(0, w, x, stride, kNoIndex);
    } else if constexpr (turns > 1) {
      for (int64_t i = 0; i < count; i++, w += turns * unit) {
        TWOFOUR_UNROLL
        for (int g = 0; g < turns; g++) add(g % sets, w + g * unit, x + g * all * 4, stride, index + i);
      }
    } else {
      int64_t i = 0;
      for (; i + sets * taken <= count; i += sets * taken, w += sets * unit) {
        TWOFOUR_UNROLL
        for (int g = 0; g < sets; g++) add(g, w + g * unit, x, stride, indices_of(index + i, g));
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

// The rows of a unit for T tokens -> answer[vector][T], of inputs brought side by side those of x[T][strips].
template <class D, int S, int U, int T>
TWOFOUR_INLINE void unit_rows(const Blocks& b, int64_t unit, const char* x, int64_t stride, typename D::Sum* answer) {
  using One = Strip<D, S, U, T>;
  using Sum = typename D::Sum;
  constexpr int strips = kBlockUnit / S, width = One::width, together = width > S ? width / S : 1;
  const int64_t each = One::beside ? kept_bytes_of(b.shape) : 0, run = U == 0 ? 0 : b.shape.run;
  Sum parts[together * T];
  for (int j = 0; j < strips; j++) {
    const int64_t s = unit * strips + j, begin = b.starts[s];
    One strip;
    const int64_t steps = U == 0 ? begin / D::per : begin * run;
    strip.run(b.weights + steps * S * 4, b.indices + begin, b.starts[s + 1] - begin, b.head.indices - begin,
              x + j * each, stride);
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
}

// The rows of `units` units of one part for T tokens from `first` on.
template <class D, int S, int U, int T>
TWOFOUR_NOINLINE void units_rows(const Matmul& a, const Blocks& b, const Keepers& keepers, int64_t unit, int64_t units,
                                 const char* x, int64_t stride, const typename D::Token* kept, int64_t first, char* scratch) {
  constexpr int sums = kBlockUnit / D::V::width * T;  // of a unit
  typename D::Sum answer[kUnitsTogether * sums];
  for (int64_t n = 0; n < units; n++) {
    if constexpr (Strip<D, S, U, 1>::beside) {
      keep_unit<S>(b, keepers, unit + n, x, stride, T, scratch);
      unit_rows<D, S, U, T>(b, unit + n, scratch, kBlockUnit / S * kept_bytes_of(b.shape), answer + n * sums);
    } else {
      unit_rows<D, S, U, T>(b, unit + n, x, stride, answer + n * sums);
    }
  }
  b.finish<D>(a, answer, kept, first, T, unit, units);
}

template <class D, int S, int U>
void units_rows_of(int64_t tokens, const Matmul& a, const Blocks& b, const Keepers& keepers, int64_t unit, int64_t units,
                   const char* x, int64_t stride, const typename D::Token* kept, int64_t first, char* scratch) {
  while (tokens > 0) {
    const int64_t piece = tokens >= kFewTokens ? kFewTokens : tokens >= 2 ? 2 : 1;
    const auto run = piece == 4 ? units_rows<D, S, U, 4> : piece == 2 ? units_rows<D, S, U, 2> : units_rows<D, S, U, 1>;
    run(a, b, keepers, unit, units, x, stride, kept, first, scratch);
    tokens -= piece, first += piece, x += piece * stride, kept += piece;
  }
}

// Calls visit(unit, units) for all of [begin, end), up to `most` of one part at a time, upwards from the last.
template <class Visit>
TWOFOUR_INLINE void for_units(const BlockShape& shape, int64_t begin, int64_t end, int64_t most, bool upwards,
                              const Visit& visit) {
  while (begin < end) {
    const int64_t inside = upwards ? (end - 1) % shape.part_units + 1 : shape.part_units - begin % shape.part_units;
    const int64_t units = least(most, least(inside, end - begin));
    visit(upwards ? end - units : begin, units);
    if (upwards) end -= units;
    else begin += units;
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
void block_rows(const Matmul& a, const Keepers& keepers = kKeepers) {
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
        // The weights of one unit stay in L1 for more tokens than one piece has.
        for_units(b.shape, u0, u1, count > kFewTokens ? 1 : kUnitsTogether, a.upwards, [&](int64_t unit, int64_t units) {
          units_rows_of<D, strip.value, run.value>(count, a, b, keepers, unit, units, x, plan.token_bytes, kept + pass, pass,
                                                   scratch);
        });
      });
    }
  });
}

}  // namespace
