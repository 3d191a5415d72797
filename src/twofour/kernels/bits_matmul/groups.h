// Dots of bytes with a scale for each group of inputs: y = sum over groups of scale * (whole sum of the group), in float32
// and in their order, times the scale of the token. Weights are codes of 1, 2, 4 or 8 bits that are taken apart in registers.
//
// Inputs are bytes with a sign: a code less 128. One that stays real is a whole number of three of them, q = 65536 h + 256 m
// + l, times a scale of its token: |x - scale q| <= 2^-23 of the greatest |x|. Each of the three is multiplied as a token of
// its own, exactly; a group's sums are put together in float32.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>
#include <type_traits>

#include "bytes.h"

namespace {

using twofour::GroupShape;

constexpr int kDigits = 3;                    // bytes of an input that stays real
constexpr int kMostOfDigits = (1 << 22) - 1;  // the greatest such q: Lanes::to_ints rounds no greater ones everywhere
constexpr uint32_t kDigitsAround = 0x808080;  // what makes digits from -128 on those from 0 on
constexpr int64_t kManyTokens = 128;          // from which on a panel is taken apart once for all of them
constexpr int64_t kLargestOfWords = 256;      // inputs of a group, times their step, whose sum of bytes fits 16 bits
constexpr int64_t kGroupNumbers = 6 * kBytesPanel;  // bytes of scales and sums before the codes of a group
constexpr int kApartInGroups = 2;             // places of codes with sums of their own: of short groups more take longer to add up

// Whether values less their zero points are bytes with a sign.
inline bool values_are_bytes(const BitsHead& head, bool shifted) {
  const int32_t bits = head.rest[0], step = head.rest[1], least = head.rest[2], span = step * ((1 << bits) - 1);
  return shifted ? span <= 127 : least >= -128 && span + least <= 127;
}
inline uint32_t step_of_inputs(const Matmul& a) { return static_cast<uint32_t>(a.quantization.x_factor == 2 ? 2 : 1); }

// Tokens in the workspace: the facts of all, then of each of a pass its rows of bytes (one, or three) and their sums in every
// group, times the level of code 0 where it is one; behind them, of many tokens, the values of a panel for each of the team.
template <class D>
struct GroupPlan {
  bool real;
  int64_t rows, padded, groups, sums, token_bytes, team;
  BitsPlan passes;
  uint32_t factor;
  int64_t panel_bytes = 0;  // of values; 0: codes are taken apart for each tile

  explicit GroupPlan(const Matmul& a)
      : real(a.quantization.x_factor == 0), rows(real ? kDigits : 1), padded(padded_inputs(a.in_features)),
        groups(a.group > 0 ? a.in_features / a.group : 1), sums(rows * padded),
        token_bytes(sums + round_up(rows * groups * 4, 64)), team(a.threads > 1 ? a.threads : 1), passes(a, token_bytes, D::tokens) {
    const auto& head = *static_cast<const BitsHead*>(a.weight);
    factor = step_of_inputs(a) * (a.zeros ? 1 : static_cast<uint32_t>(head.beta));
    if (real || a.quantization.x_factor != 1 || a.tokens < kManyTokens || !values_are_bytes(head, a.zeros)) return;
    const GroupShape shape(a.in_features, head.bits, a.group, a.zeros);
    panel_bytes = shape.groups * (shape.blocks * (8 / head.bits) + 1) * kBytesPanel * 4;
  }
  int64_t values() const { return round_up(passes.bytes(), 64); }
  int64_t bytes() const { return values() + team * panel_bytes; }
};

// A token in three rows of digits.
template <class V, class X>
TWOFOUR_NOINLINE Range digits(const X* x, int64_t in, int64_t padded, uint8_t* to) {
  const Span span = span_of<V>(x, in);
  const float height = -span.least > span.most ? -span.least : span.most, scale = height / static_cast<float>(kMostOfDigits);
  const Range range{scale < kLeastScale ? kLeastScale : scale, 0};
  const Rounder<V> rounder(1.0f / range.scale, 0, -kMostOfDigits, kMostOfDigits);
  for (int64_t k = 0; k < in; k += V::width) {
    const auto q = (typename V::U)rounder(V::load(x + k, in - k)) + kDigitsAround;
    for (int d = 0; d < kDigits; d++) V::store_x((typename V::ints)((q >> 8 * d) ^ 0x80), to + d * padded, k, 8);
  }
  for (int d = 0; d < kDigits; d++) std::memset(to + d * padded + in, 0, static_cast<size_t>(padded - in));
  return span.finite ? range : Range{__builtin_nanf(""), 0};
}

// Of each group of a token's bytes with a sign their sum, times `factor`.
inline void sums_of_groups(const uint8_t* row, const GroupShape& shape, uint32_t factor, int32_t* sums) {
  const auto inputs = static_cast<int32_t>(shape.inputs), around = kCodesAround * inputs;
  for (int64_t g = 0; g < shape.groups; g++)
    sums[g] = static_cast<int32_t>(factor * static_cast<uint32_t>(sum_of_bytes(row + g * inputs, inputs, kCodesAround) - around));
}

// Token `t` of the call as rows of bytes with their sums.
template <class V, class Plan>
void group_token(const Matmul& a, int64_t t, const Plan& plan, const GroupShape& shape, uint8_t* to, const TokenFacts& facts) {
  auto* sums = reinterpret_cast<int32_t*>(to + plan.sums);
  if (!plan.real) {
    token_codes<V>(a, t, to, plan.padded, facts);
    if (plan.panel_bytes > 0) return;
    for (int64_t k = 0; k < plan.padded; k++) to[k] ^= kCodesAround;
    return sums_of_groups(to, shape, plan.factor, sums);
  }
  const auto cut = [&]<class X>(const X* x) { return digits<V>(x + t * a.x_stride, a.in_features, plan.padded, to); };
  facts.ranges[t] = a.x_type == Type::f32 ? cut(static_cast<const float*>(a.x)) : cut(static_cast<const uint16_t*>(a.x));
  for (int d = 0; d < kDigits; d++) sums_of_groups(to + d * plan.padded, shape, plan.factor, sums + d * plan.groups);
}

// A panel for some tokens of a pass.
struct GroupTile {
  const Matmul& a;
  const BitsWeight& w;
  const GroupShape& shape;
  const char* panel;
  const uint8_t* x;  // of the first token
  int64_t padded, sums, token_bytes;
  const Range* ranges;
};

// A vector of numbers of 8 or 16 bits; gcc 12's vectors widen bytes one by one.
template <class V, class N>
TWOFOUR_INLINE typename V::ints widened(const N* from) {
  typedef N Narrow __attribute__((vector_size(V::width * sizeof(N))));
  Narrow v;
  std::memcpy(&v, from, sizeof v);
#if defined(TWOFOUR_SET_avx512)
  if constexpr (sizeof(N) == 1) return _mm512_cvtepi8_epi32((__m128i)v);
  else return _mm512_cvtepi16_epi32((__m256i)v);
#elif defined(TWOFOUR_SET_avx2)
  if constexpr (sizeof(N) == 1) return _mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)v));
  else return _mm256_cvtepi16_epi32((__m128i)v);
#else
  return (typename V::ints)__builtin_convertvector(v, typename V::I);
#endif
}

// sum + numbers * factor. `narrow`: both fit 16 bits, so that one instruction multiplies and adds them.
template <class V>
TWOFOUR_INLINE typename V::ints plus_product(typename V::ints sum, typename V::ints numbers, int32_t factor, bool narrow) {
#if defined(TWOFOUR_VNNI)
  if (narrow) {
    const auto pair = (typename V::ints)(typename V::I{} + (factor & 0xffff));  // beside the upper halves, which are signs
    TWOFOUR_VNNI("vpdpwssd", sum, numbers, pair);
    return sum;
  }
#endif
  return V::minus_product(sum, numbers, -factor);
}

// From sums over codes times inputs to those over values. What code 0 stands for times the sum of inputs is where a sum begins, or
// is added behind, where steps are not one or outputs have zero points of their own. `plain`: neither, and weights have groups.
template <class V, bool plain>
struct GroupLevels {
  const uint32_t alpha;
  const bool shifted, begun, narrow, grouped;
  static constexpr int32_t kNothing = 0;
  explicit GroupLevels(const GroupTile& tile)
      : alpha(step_of_inputs(tile.a) * static_cast<uint32_t>(tile.w.head.alpha)), shifted(!plain && tile.a.zeros),
        begun(alpha == 1 && !shifted), narrow(step_of_inputs(tile.a) * tile.shape.inputs <= kLargestOfWords),
        grouped(plain || tile.a.group > 0) {}
  TWOFOUR_INLINE typename V::ints beginning(const int32_t* of_inputs) const {
    return (typename V::ints)V::broadcast(reinterpret_cast<const float*>(plain || begun ? of_inputs : &kNothing));
  }
  TWOFOUR_INLINE typename V::ints operator()(typename V::ints sum, typename V::ints betas, int32_t of_inputs) const {
    if (plain || begun) return sum;
    if (alpha != 1) sum = (typename V::ints)((typename V::U)sum * alpha);
    if (shifted) return plus_product<V>(sum, betas, of_inputs, narrow);
    return (typename V::ints)((typename V::U)sum + static_cast<uint32_t>(of_inputs));
  }
};

// Adds a group of T tokens, each R rows, to `totals`, [token][vector].
template <class D, int bits, int R, int T, bool plain>
TWOFOUR_INLINE void add_group(const GroupTile& tile, const GroupLevels<typename D::V, plain>& levels, int64_t g, int64_t output,
                              typename D::V::reg (&totals)[T][D::columns]) {
  using V = typename D::V;
  constexpr int per = 8 / bits;
  const char* group = tile.panel + g * tile.shape.bytes;
  const char* codes = group + tile.shape.codes + output * 4;
  const uint8_t* x = tile.x + g * tile.shape.inputs;
  const int32_t around = kCodesAround * tile.a.quantization.x_factor;
  const auto sums = [&](int r) TWOFOUR_INLINED {
    return reinterpret_cast<const int32_t*>(tile.x + r / R * tile.token_bytes + tile.sums) + r % R * tile.shape.groups + g;
  };
  // Whole panels that one token reads, the processor fetches better alone.
  constexpr bool whole = D::columns * V::width == kBytesPanel, fetches = !whole || T > 1;
  if (whole && fetches) {
    TWOFOUR_UNROLL
    for (int64_t b = 0; b < kGroupNumbers; b += 64) __builtin_prefetch(group + 2 * kBytesAhead + b);
  }
  CodeSumSets<D, bits, T * R, kApartInGroups> sums_of;
  TWOFOUR_UNROLL
  for (int r = 0; r < T * R; r++) sums_of.begin(r, levels.beginning(sums(r)));
  sums_of.each(0, tile.shape.blocks, [&](auto& part, int64_t) TWOFOUR_INLINED {
    typename D::Sum packed[D::columns];
    TWOFOUR_UNROLL
    for (int c = 0; c < D::columns; c++) {
      packed[c] = V::load_index(codes + c * V::width * 4);
      if (fetches && c * V::width % 16 == 0) __builtin_prefetch(codes + 2 * kBytesAhead + c * V::width * 4);
    }
    TWOFOUR_UNROLL
    for (int i = 0; i < per; i++)
      part.add(packed, i, [&](int r) {
        return reinterpret_cast<const uint32_t*>(x + (r / R) * tile.token_bytes + (r % R) * tile.padded + 4 * i);
      });
    codes += kBytesPanel * 4;
    x += 4 * per;
  });
  TWOFOUR_UNROLL
  for (int c = 0; c < D::columns; c++) {
    const int64_t at = output + c * V::width;
    const char* of_values = group + kBytesPanel * 4 + at * tile.shape.sum_bytes;
    const auto scale = levels.grouped ? V::load_unaligned(reinterpret_cast<const float*>(group) + at) : V::all(1.0f);
    typename V::ints betas{}, values{};
    if (!plain && levels.shifted) betas = widened<V>(reinterpret_cast<const int8_t*>(group) + tile.shape.zeros + at);
    if (R == 1) values = levels.grouped ? widened<V>(reinterpret_cast<const int16_t*>(of_values)) : V::load_ints(of_values);
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      typename V::reg real = V::zero();
      if constexpr (R == 1) {
        const auto sum = levels(sums_of.at(t, c), betas, *sums(t));
        real = V::to_real(plus_product<V>(sum, values, around - tile.ranges[t].zero, levels.grouped));
      } else {
        TWOFOUR_UNROLL
        for (int r = R - 1; r >= 0; r--)  // Horner: the highest digit first
          real = V::fma(real, V::all(256.0f), V::to_real(levels(sums_of.at(t * R + r, c), betas, *sums(t * R + r))));
      }
      totals[t][c] = totals[t][c] + apart(real * scale);
    }
  }
}

// Sums of groups, scaled by their tokens, to what the call answers, tokens from `first` on.
template <class D, int T>
TWOFOUR_INLINE void leave_totals(const GroupTile& tile, const typename D::V::reg (&totals)[T][D::columns], int64_t output,
                                 int64_t panel, int64_t first) {
  using V = typename D::V;
  const auto each = [&]<class Out>(std::type_identity<Out>, const auto& leave) TWOFOUR_INLINED {
    for (int c = 0; c < D::columns; c++) {
      const int64_t at = output + c * V::width, row = panel * kBytesPanel + at;
      if (row >= tile.a.out_features) break;
      const Out answers(tile.a, row, tile.a.out_features);
      const auto scale = V::load_unaligned(reinterpret_cast<const float*>(tile.panel) + at);
      for (int t = 0; t < T; t++) {
        const auto token = V::all(tile.ranges[t].scale);
        const typename V::reg scaled[] = {totals[t][c] * (tile.a.group > 0 ? token : token * scale)};
        leave(answers, scaled, t);
      }
    }
  };
  if (tile.a.coded == nullptr)
    return with_answers(tile.a, [&](auto as) {
      each(std::type_identity<Answers<V>>{}, [&](const auto& answers, const auto& scaled, int t)
                                                 TWOFOUR_INLINED { answers.template leave<decltype(as)>(scaled, first + t); });
    });
  with_codes<V>(tile.a, [&](auto made) {
    each(std::type_identity<CodedAnswers<V, typename decltype(made)::type>>{},
         [&](const auto& answers, const auto& scaled, int t) TWOFOUR_INLINED { answers.leave(scaled, first + t, tile.ranges + t); });
  });
}

// T tokens of a panel, `columns` vectors of outputs at a time.
template <class D, int bits, int R, int T, bool plain>
TWOFOUR_NOINLINE void group_tile(const GroupTile& tile, int64_t first, int64_t panel) {
  using V = typename D::V;
  constexpr int64_t together = D::columns * V::width;
  const GroupLevels<V, plain> levels(tile);
  for (int64_t output = 0; output < kBytesPanel && panel * kBytesPanel + output < tile.a.out_features; output += together) {
    typename V::reg totals[T][D::columns] = {};
    for (int64_t g = 0; g < tile.shape.groups; g++) {
      if (T > 2) asm volatile("" : : "r"(&totals) : "memory");  // registers are for the sums of the group
      add_group<D, bits, R, T, plain>(tile, levels, g, output, totals);
    }
    typename V::reg made[T][D::columns];  // gcc would store totals whose address is taken after each group
    std::memcpy(&made, &totals, sizeof made);
    leave_totals<D>(tile, made, output, panel, first);
  }
}

template <class D, int bits, int R>
void group_panels(GroupTile tile, int64_t first, int64_t count, int64_t begin, int64_t end, const GroupPlan<D>& plan,
                  const uint8_t* x, const TokenFacts& facts) {
  const bool plain = tile.a.group > 0 && !tile.a.zeros && step_of_inputs(tile.a) * static_cast<uint32_t>(tile.w.head.alpha) == 1;
  for (int64_t p = begin; p < end; p++) {
    tile.panel = tile.w.weights + p * tile.shape.groups * tile.shape.bytes;
    for (int64_t t = 0; t < count;) {
      tile.x = x + t * plan.token_bytes;
      tile.ranges = facts.ranges + first + t;
      const auto run = [&](auto tokens) TWOFOUR_INLINED {
        constexpr int T = R == 1 ? tokens.value : 1;  // two of three rows took 1.25 times as long as one and one
        (plain ? group_tile<D, bits, R, T, true> : group_tile<D, bits, R, T, false>)(tile, first + t, p);
        t += T;
      };
      if (count - t >= 4) run(std::integral_constant<int, 4>{});
      else if (count - t >= 2) run(std::integral_constant<int, 2>{});
      else run(std::integral_constant<int, 1>{});
    }
  }
}

// The values of a panel as bytes, [group][inputs / 4][64 outputs][4], the sums of each group before them, 32 bits.
template <class V, int bits>
TWOFOUR_NOINLINE void panel_values(const GroupTile& tile, char* to) {
  typedef uint8_t Bytes __attribute__((vector_size(4 * V::width)));
  constexpr int per = 8 / bits;
  constexpr uint32_t mask = 0x01010101u * ((1u << bits) - 1);
  const bool twice = tile.w.head.alpha == 2;
  const auto beta = static_cast<uint8_t>(tile.w.head.beta);
  constexpr int64_t block = kBytesPanel * 4;
  for (int64_t g = 0; g < tile.shape.groups; g++) {
    const char* group = tile.panel + g * tile.shape.bytes;
    const char* codes = group + tile.shape.codes;
    for (int64_t o = 0; o < kBytesPanel; o += V::width) {
      const auto* own = reinterpret_cast<const int8_t*>(group) + tile.shape.zeros + o;
      const auto levels = tile.a.zeros ? (typename V::U)widened<V>(own) & 0xff : typename V::U{} + beta;
      const Bytes lowest = (Bytes)(levels * 0x01010101u);
      const char* sums = group + block + o * tile.shape.sum_bytes;
      char* at = to + o * 4;
      const auto of_values = tile.a.group > 0 ? widened<V>(reinterpret_cast<const int16_t*>(sums)) : V::load_ints(sums);
      V::store_ints(reinterpret_cast<int32_t*>(at), of_values);
      at += block;
      for (int64_t b = 0; b < tile.shape.blocks; b++) {
        const auto packed = (typename V::U)V::load_index(codes + b * block + o * 4);
        TWOFOUR_UNROLL
        for (int i = 0; i < per; i++, at += block) {
          Bytes values = (Bytes)(packed >> i * bits & mask);
          if (twice) values += values;
          values += lowest;
          std::memcpy(at, &values, sizeof values);
        }
      }
    }
    to += (tile.shape.blocks * per + 1) * block;
  }
}

// T tokens of a panel whose values are bytes, as group_tile.
template <class D, bool narrow, int T>
TWOFOUR_NOINLINE void value_tile(const GroupTile& tile, const char* values, int64_t group_bytes, int64_t first, int64_t panel) {
  using V = typename D::V;
  constexpr int64_t together = D::columns * V::width;
  const int64_t blocks = ceil_div(tile.shape.inputs, 4);
  const bool grouped = tile.a.group > 0;
  for (int64_t output = 0; output < kBytesPanel && panel * kBytesPanel + output < tile.a.out_features; output += together) {
    typename V::reg totals[T][D::columns] = {};
    for (int64_t g = 0; g < tile.shape.groups; g++) {
      asm volatile("" : : "r"(&totals) : "memory");  // registers are for the sums of the group
      typename D::Sum sum[T][D::columns];
      const char* w = values + g * group_bytes + output * 4;
      const uint8_t* x = tile.x + g * tile.shape.inputs;
      TWOFOUR_UNROLL
      for (int c = 0; c < D::columns; c++) {
        const auto of_values = V::load_ints(w + c * V::width * 4);
        TWOFOUR_UNROLL
        for (int t = 0; t < T; t++) sum[t][c] = plus_product<V>(typename V::ints{}, of_values, -tile.ranges[t].zero, grouped);
      }
      w += kBytesPanel * 4;
      for (int64_t b = 0; b < blocks; b++, w += kBytesPanel * 4, x += 4) {
        typename D::Sum weights[D::columns];
        TWOFOUR_UNROLL
        for (int c = 0; c < D::columns; c++) weights[c] = V::load_index(w + c * V::width * 4);
        TWOFOUR_UNROLL
        for (int t = 0; t < T; t++) {
          const auto four = D::four(reinterpret_cast<const uint32_t*>(x + t * tile.token_bytes));
          TWOFOUR_UNROLL
          for (int c = 0; c < D::columns; c++) sum[t][c] = D::template dot<narrow>(sum[t][c], four, weights[c]);
        }
      }
      const char* group = tile.panel + g * tile.shape.bytes;
      TWOFOUR_UNROLL
      for (int c = 0; c < D::columns; c++) {
        const int64_t at = output + c * V::width;
        const auto scale = grouped ? V::load_unaligned(reinterpret_cast<const float*>(group) + at) : V::all(1.0f);
        TWOFOUR_UNROLL
        for (int t = 0; t < T; t++) totals[t][c] = totals[t][c] + apart(V::to_real(sum[t][c]) * scale);
      }
    }
    leave_totals<D>(tile, totals, output, panel, first);
  }
}

// Panels [begin, end) for `count` tokens, the values of each made in `memory`.
template <class D, int bits, bool narrow>
void value_panels(GroupTile tile, int64_t first, int64_t count, int64_t begin, int64_t end, const uint8_t* x,
                  const TokenFacts& facts, char* memory) {
  const int64_t group_bytes = (tile.shape.blocks * (8 / bits) + 1) * kBytesPanel * 4;
  for (int64_t p = begin; p < end; p++) {
    tile.panel = tile.w.weights + p * tile.shape.groups * tile.shape.bytes;
    panel_values<typename D::V, bits>(tile, memory);
    for (int64_t t = 0; t < count;) {
      tile.x = x + t * tile.token_bytes;
      tile.ranges = facts.ranges + first + t;
      // half as many tokens, whose totals stay in registers, took 1.3 times as long: each reads all values
      const int64_t left = count - t, some = left >= D::tokens ? D::tokens : left >= 2 ? 2 : 1;
      (some == D::tokens ? value_tile<D, narrow, D::tokens> : some == 2 ? value_tile<D, narrow, 2> : value_tile<D, narrow, 1>)(
          tile, memory, group_bytes, first + t, p);
      t += some;
    }
  }
}

// Calls use(bits of a stored code) with a constant.
template <class Use>
void with_bits(int64_t bits, const Use& use) {
  if (bits == 1) return use(std::integral_constant<int, 1>{});
  if (bits == 2) return use(std::integral_constant<int, 2>{});
  if (bits == 4) return use(std::integral_constant<int, 4>{});
  return use(std::integral_constant<int, 8>{});
}

template <class D>
void group_product(const Matmul& a) {
  if (a.tokens <= 0) return;
  const BitsWeight w(*twofour::bits_layout("bits_groups"), a.weight, a.out_features, a.in_features);
  const GroupShape shape(a.in_features, w.head.bits, a.group, a.zeros);
  const GroupPlan<D> plan(a);
  const TokenFacts facts(a.workspace, a.tokens);
  auto* x = static_cast<uint8_t*>(a.workspace) + plan.passes.facts;
  const GroupTile tile{a, w, shape, nullptr, nullptr, plan.padded, plan.sums, plan.token_bytes, nullptr};
  with_team(a.threads, [&](const Team& team) {
    int64_t begin, end;
    team.share(w.panels, 1, &begin, &end);
    for (int64_t pass = 0; pass < a.tokens; pass += plan.passes.per_pass) {
      const int64_t count = least(plan.passes.per_pass, a.tokens - pass);
      if (pass > 0) team.barrier();  // the last tokens are still being read
      for (int64_t t = team.me; t < count; t += team.size)
        group_token<typename D::V>(a, pass + t, plan, shape, x + t * plan.token_bytes, facts);
      team.barrier();
      with_bits(w.head.bits, [&](auto bits) {
        if (plan.panel_bytes > 0) {
          // no code times a value reaches 2^14
          const bool narrow = a.quantization.x_most * 128 < 1 << 14;
          char* memory = static_cast<char*>(a.workspace) + plan.values() + team.me * plan.panel_bytes;
          (narrow ? value_panels<D, bits.value, true> : value_panels<D, bits.value, false>)(tile, pass, count, begin, end, x,
                                                                                            facts, memory);
          return;
        }
        const auto panels = plan.real ? group_panels<D, bits.value, kDigits> : group_panels<D, bits.value, 1>;
        panels(tile, pass, count, begin, end, plan, x, facts);
      });
    }
  });
}

}  // namespace
