// Attention of one head at a time in whole numbers, operands and answers in bfloat16: queries become bytes by a range for
// each of them, keys by one for the head, values by one for each column; or they are bytes by ranges of data. Both products are
// exact sums of int32. README.md has the formulas. Internal linkage.
#pragma once

#include <cmath>
#include <cstring>

#include "byte_panels.h"
#include "byte_weights.h"
#include "few_queries.h"

namespace {

// The most that scores of a query may be off: the standard deviation of what rounding adds, at most 127 sqrt(width / 6) units.
// Of more the query is computed in floats.
constexpr float kMostNoise = 0.5f;
inline float coarsest_unit(int64_t width) {
  return kMostNoise * kLog2E / (127.0f * std::sqrt(static_cast<float>(width) / 6.0f));
}

// `kRows` queries by two vectors of keys (or of value columns) are summed in registers.
template <int kRows>
struct ByteBlocks : BytePanels {
  static constexpr int kBeside = kRows % 4 == 0 ? 4 : 2;  // rows that are looked at side by side: their latencies overlap

  static int64_t bytes(const Attention& a) { return Plan(a, kRows).bytes(); }

  static void run(const Attention& a, int64_t begin, int64_t end, void* workspace) {
    for (int64_t item = begin, last; item < end; item = last) {
      const int64_t batch = item / a.heads;
      last = least(end, (batch + 1) * a.heads);
      run_heads(on_seen_keys(a, batch), a, item, last, workspace);
    }
  }

  // The call on the keys that a batch entry sees, without a mask, where those are its first ones: padding takes no time then. Of
  // keys that a mask hides ranges hold nothing and weights are 0, so that the bits are the same.
  static Attention on_seen_keys(const Attention& a, int64_t batch) {
    Attention found = a;
    if (a.mask_kind != AttentionMask::keep || a.causal || !one_mask(a)) return found;
    const uint8_t* kept = static_cast<const uint8_t*>(a.mask) + a.mask_at(batch, 0, 0);
    int64_t count = 0;
    while (count < a.keys && kept[count]) ++count;
    for (int64_t j = count; j < a.keys; ++j)
      if (kept[j]) return found;
    if (count > 0) found.keys = count, found.mask_kind = AttentionMask::none;
    return found;
  }

  // Heads of one batch entry. `given` is the call as it was made, `a` on its keys alone; both plans fit the workspace.
  static void run_heads(const Attention& a, const Attention& given, int64_t begin, int64_t end, void* workspace) {
    const Plan plan(a, kRows);
    const Room room(plan, static_cast<char*>(workspace));
    const float coarsest = coarsest_unit(a.width);
    float scale = 0.0f;  // of the keys
    for (int64_t item = begin, packed = -1; item < end; ++item) {
      const int64_t batch = item / a.heads, head = item % a.heads, key_head = head / (a.heads / a.key_heads);
      const bool whole = a.units != nullptr;  // operands are bytes
      if (const int64_t source = batch * a.key_heads + key_head; source != packed) {
        if (whole) {
          copy_keys(a, plan, a.key_rows<uint8_t>(batch, key_head), room);
          copy_values(a, plan, a.value_rows<uint8_t>(batch, key_head), key_head * a.value_width, room);
        } else {
          const uint8_t* seen = seen_keys(a, batch, room.seen);
          scale = pack_keys(a, plan, a.key_rows<E>(batch, key_head), seen, room);
          pack_values(a, plan, a.value_rows<E>(batch, key_head), seen, room);
        }
        packed = source;
      }
      const HeadRows<const E> q = a.query_rows<E>(batch, head);
      const HeadAnswers<FloatCells<E>> out(a, batch, head);
      for (int64_t first = 0; first < a.queries; first += kRows) {
        const int64_t rows = least(a.queries - first, kRows), seen = a.causal ? least(first + rows, a.keys) : a.keys;
        float units[kRows], weights[kRows]{};
        bool lost[kRows]{}, some = false, coarse = false;
        Queries queries{room.queries, 4 * plan.row};
        if (whole) queries = queries_of(a, plan, a.query_rows<uint8_t>(batch, head), head, first, rows, room, units);
        else pack_queries(a, plan, q, first, rows, scale, room.queries, units);
        score(a, plan, room, queries, seen, units);
        if (a.mask_kind == AttentionMask::none && !a.causal) {
          for (int r = 0; r < kRows; r += kBeside)
            some |= softmax_beside(seen, plan.score_stride, a.unseen, units + r, room.scores + r * plan.score_stride,
                                   room.rests + r * plan.score_stride, weights + r, lost + r);
        } else {
          for (int r = 0; r < rows; ++r) {
            weights[r] = softmax(a, batch, head, first + r, seen, units[r], room.scores + r * plan.score_stride,
                                 room.rests + r * plan.score_stride, &lost[r]);
            some |= lost[r];
          }
          for (int r = static_cast<int>(rows); r < kRows; ++r)  // so that unused rows hold numbers
            std::memset(room.scores + r * plan.score_stride, 0, static_cast<size_t>(round_up(seen, 4)));
        }
        if (some) {
          second_bytes(plan, room, round_up(seen, 4), lost, weights);
          weigh<true>(a, plan, room, seen, weights, out, first, rows);
        } else {
          weigh<false>(a, plan, room, seen, weights, out, first, rows);
        }
        for (float unit : units) coarse |= unit > coarsest;
        for (int r = 0; r < rows && coarse && !whole; ++r)
          if (units[r] > coarsest && units[r] <= __FLT_MAX__)
            FewQueries<FloatCells<E>>::run_row(given, batch, head, q, a.key_rows<E>(batch, key_head),
                                               a.value_rows<E>(batch, key_head), out, first + r, room.scores);
      }
    }
  }

  // A block of queries as bytes around 128, `stride` from row to row.
  struct Queries {
    const uint8_t* rows;
    int64_t stride;
  };

  // Queries that are bytes, read where they are, if whole dwords of so many rows stand there.
  static Queries queries_of(const Attention& a, const Plan& plan, const HeadRows<const uint8_t>& q, int64_t head, int64_t first,
                            int64_t rows, const Room& room, float (&units)[kRows]) {
    for (float& unit : units) unit = a.units[head];
    const uint8_t* from = q.at(first);
    const bool dwords = a.width % 4 == 0 && q.stride % 4 == 0 && reinterpret_cast<uintptr_t>(from) % 4 == 0;
    if (rows == kRows && dwords && q.order == nullptr) return {from, q.stride};
    for (int r = 0; r < kRows; ++r) {
      uint8_t* to = room.queries + r * 4 * plan.row;
      std::memset(to, 0x80, static_cast<size_t>(4 * plan.row));
      std::memcpy(to, q.at(first + least(r, rows - 1)), static_cast<size_t>(a.width));
    }
    return {room.queries, 4 * plan.row};
  }

  // Writes a block of queries as bytes around 128, and for each what a unit of its scores is in units of ln 2: NaN where it
  // holds a number that is not finite.
  static void pack_queries(const Attention& a, const Plan& plan, const HeadRows<const E>& q, int64_t first, int64_t rows,
                           float key_scale, uint8_t* block, float (&units)[kRows]) {
    const float by = a.scale * kLog2E, sign = by < 0.0f ? -1.0f : 1.0f;
    reg broken[kBeside];
    TWOFOUR_UNROLL
    for (int i = 0; i < kBeside; ++i) broken[i] = V::zero();
    for (int64_t r = 0; r < kRows; r += kBeside, block += kBeside * 4 * plan.row) {
      const E* from[kBeside];
      reg most[kBeside];
      float largest[kBeside];
      TWOFOUR_UNROLL
      for (int i = 0; i < kBeside; ++i) from[i] = q.at(first + least(r + i, rows - 1)), most[i] = V::zero();
      for (int64_t c = 0; c < a.width; c += V::width) {
        TWOFOUR_UNROLL
        for (int i = 0; i < kBeside; ++i) {
          const reg x = V::load(from[i] + c, a.width - c);
          most[i] = V::max(most[i], V::magnitude(x));
          broken[i] = V::fma(x, V::zero(), broken[i]);
        }
      }
      largest_lanes<V>(most, largest);
      float factors[kBeside];
      for (int i = 0; i < kBeside; ++i) {
        const float step = largest[i] * (1.0f / 127.0f), scale = step < kLeastScale ? kLeastScale : step;
        factors[i] = sign / scale;
        units[r + i] = scale * key_scale * (sign * by);
      }
      TWOFOUR_UNROLL
      for (int i = 0; i < kBeside; ++i) {
        const reg factor = V::all(factors[i]);
        for (int64_t c = 0; c < 4 * plan.row; c += kChunk) {
          ints four[4];
          TWOFOUR_UNROLL
          for (int part = 0; part < 4; ++part) {
            const int64_t at = c + part * V::width;
            four[part] = ints{};
            if (at >= a.width) continue;
            four[part] = (ints)((V::U)V::to_ints(V::load(from[i] + at, a.width - at) * factor) + 128);
          }
          V::store_four(block + i * 4 * plan.row + c, four);
        }
      }
    }
    for (int i = 1; i < kBeside; ++i) broken[0] = broken[0] + broken[i];
    if (V::sum(broken[0]) == 0.0f) return;
    for (int64_t r = 0; r < rows; ++r) {  // some of them
      const E* row = q.at(first + r);
      reg odd = V::zero();
      for (int64_t c = 0; c < a.width; c += V::width) odd = V::fma(V::load(row + c, a.width - c), V::zero(), odd);
      units[r] += V::sum(odd);
    }
  }

  // sums[r][c] += dots of left[r * stride ...], unsigned, and right[.. * kWide + c], signed, over `depth` dwords.
  static inline __attribute__((always_inline)) void multiply(const uint8_t* left, int64_t stride, const uint8_t* right,
                                                             int64_t depth, ints (&sums)[kRows][kColumns]) {
    for (int64_t k = 0; k < depth; ++k, right += 4 * kWide) {
      ints columns[kColumns];
      TWOFOUR_UNROLL
      for (int c = 0; c < kColumns; ++c)
        columns[c] = (ints)V::load_shared(reinterpret_cast<const float*>(right) + c * V::width);
      TWOFOUR_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const auto four = (ints)V::broadcast_shared(reinterpret_cast<const float*>(left + r * stride) + k);
        TWOFOUR_UNROLL
        for (int c = 0; c < kColumns; ++c) sums[r][c] = dot_bytes<V, false>(sums[r][c], four, columns[c]);
      }
    }
  }

  // Scores as whole numbers, or where a mask is added to them in units of ln 2.
  static TWOFOUR_NOINLINE void score(const Attention& a, const Plan& plan, const Room& room, const Queries& queries, int64_t seen,
                    const float (&units)[kRows]) {
    const bool added = a.mask_kind == AttentionMask::add;
    for (int64_t key = 0; key < seen; key += kWide) {
      ints sums[kRows][kColumns];
      TWOFOUR_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        const ints start = V::load_ints(room.sums + key + c * V::width);
        TWOFOUR_UNROLL
        for (int r = 0; r < kRows; ++r) sums[r][c] = start;
      }
      multiply(queries.rows, queries.stride, room.keys + 4 * key * plan.width, plan.width, sums);
      TWOFOUR_UNROLL
      for (int r = 0; r < kRows; ++r)
        TWOFOUR_UNROLL
        for (int c = 0; c < kColumns; ++c) {
          const reg found = V::to_real(sums[r][c]);
          V::store_unaligned(room.scores + r * plan.score_stride + key + c * V::width,
                             added ? apart(found * V::all(units[r])) : found);
        }
    }
  }

  // Gives weights of rows that are lost two bytes each, those of others a second one of 0; what a weight counts is for 256ths then.
  static TWOFOUR_NOINLINE void second_bytes(const Plan& plan, const Room& room, int64_t count, const bool (&lost)[kRows],
                                            float (&weights)[kRows]) {
    for (int r = 0; r < kRows; ++r) {
      auto* upper = reinterpret_cast<uint8_t*>(room.scores + r * plan.score_stride);
      uint8_t* lower = room.rests + r * plan.score_stride;
      if (lost[r]) weights[r] = 1.0f / two_bytes(upper, lower, count);
      else std::memset(lower, 0, static_cast<size_t>(count)), weights[r] *= 1.0f / 256.0f;
    }
  }

  // Turns a row of scores into bytes, zeros where only other rows of the block see a key; returns one over their sum, or
  // `unseen` where no key is seen, or NaN where a unit or a mask is none.
  static TWOFOUR_NOINLINE float softmax(const Attention& a, int64_t batch, int64_t head, int64_t row, int64_t seen, float unit,
                                        float* scores, uint8_t* rests, bool* lost) {
    if (unit - unit != 0.0f) return __builtin_nanf("");
    const bool added = a.mask_kind == AttentionMask::add;
    const int64_t own = a.causal ? least(row + 1, seen) : seen, whole = round_up(own, kChunk);
    for (int64_t j = own; j < whole; ++j) scores[j] = -__builtin_inff();
    const float largest = a.mask_kind == AttentionMask::none ? largest_of(scores, whole)
                                                             : masked<V>(a, a.mask_at(batch, head, row), own, scores);
    if (added && holds_nan(scores, whole)) return __builtin_nanf("");
    const ByteSums<V> found = byte_weights<V>(scores, rests, whole, largest, added ? kSteps : steps_of(unit));
    const float sum = V::sum(V::to_real(found.weights));
    *lost = is_lost(sum, V::sum(V::to_real(found.off)));
    if (whole < round_up(seen, 4)) {
      const auto rest = static_cast<size_t>(round_up(seen, 4) - whole);
      std::memset(reinterpret_cast<char*>(scores) + whole, 0, rest);
      std::memset(rests + whole, 128, rest);
    }
    return largest == -__builtin_inff() ? a.unseen : 1.0f / sum;
  }

  // What turns scores into steps.
  static TWOFOUR_INLINE float steps_of(float unit) { return unit < __FLT_MAX__ / kSteps ? unit * kSteps : __FLT_MAX__; }

  // The same for kBeside rows of scores, `stride` apart, that see all of `seen` keys and have no mask; returns whether one is lost.
  static TWOFOUR_INLINE bool softmax_beside(int64_t seen, int64_t stride, float unseen, const float* units, float* scores,
                                            uint8_t* rests, float* weights, bool* lost) {
    const int64_t whole = round_up(seen, kChunk);
    reg most[kBeside];
    ints total[kBeside], off[kBeside];
    float largest[kBeside], sums[kBeside], rounded[kBeside];
    TWOFOUR_UNROLL
    for (int r = 0; r < kBeside; ++r) {
      most[r] = V::all(-__builtin_inff());
      for (int64_t j = seen; j < whole; ++j) scores[r * stride + j] = -__builtin_inff();
    }
    for (int64_t j = 0; j < whole; j += V::width) {
      TWOFOUR_UNROLL
      for (int r = 0; r < kBeside; ++r) most[r] = V::max(most[r], V::load_unaligned(scores + r * stride + j));
    }
    largest_lanes<V>(most, largest);
    TWOFOUR_UNROLL
    for (int r = 0; r < kBeside; ++r) {
      const ByteSums<V> found = byte_weights<V>(scores + r * stride, rests + r * stride, whole, largest[r], steps_of(units[r]));
      total[r] = found.weights, off[r] = found.off;
    }
    sums_of_lanes<V>(total, sums);
    sums_of_lanes<V>(off, rounded);
    bool some = false;
    for (int r = 0; r < kBeside; ++r) {
      const bool real = units[r] - units[r] == 0.0f;
      weights[r] = !real ? __builtin_nanf("") : sums[r] > 0.0f ? 1.0f / sums[r] : unseen;
      some |= lost[r] = real & is_lost(sums[r], rounded[r]);
    }
    return some;
  }

  static bool holds_nan(const float* scores, int64_t count) {
    reg odd = V::zero();
    for (int64_t j = 0; j < count; j += V::width) {
      const reg s = V::load_unaligned(scores + j);
      odd = odd + (reg)((V::I)(s != s) & (V::I)V::all(1.0f));
    }
    return V::sum(odd) != 0.0f;
  }

  static float largest_of(const float* scores, int64_t count) {
    reg most[4];
    if (count == 0) return -__builtin_inff();
    TWOFOUR_UNROLL
    for (int i = 0; i < 4; ++i) most[i] = V::load_unaligned(scores + i * V::width);
    for (int64_t j = kChunk; j < count; j += kChunk)
      TWOFOUR_UNROLL
      for (int i = 0; i < 4; ++i) most[i] = V::max(most[i], V::load_unaligned(scores + j + i * V::width));
    return V::largest(V::max(V::max(most[0], most[1]), V::max(most[2], most[3])));
  }

  static TWOFOUR_INLINE void clear(ints (&sums)[kRows][kColumns]) {
    TWOFOUR_UNROLL
    for (int r = 0; r < kRows; ++r)
      TWOFOUR_UNROLL
      for (int c = 0; c < kColumns; ++c) sums[r][c] = ints{};
  }

  // `two`: weights have lower bytes too.
  template <bool two>
  static void weigh(const Attention& a, const Plan& plan, const Room& room, int64_t seen,
                                     const float (&weights)[kRows], const HeadAnswers<FloatCells<E>>& out, int64_t first,
                                     int64_t rows) {
    for (int64_t column = 0; column < a.value_width; column += kWide) {
      const uint8_t* values = room.values + 4 * column * plan.depth;
      ints sums[kRows][kColumns];
      clear(sums);
      multiply(reinterpret_cast<const uint8_t*>(room.scores), 4 * plan.score_stride, values, ceil_div(seen, 4), sums);
      const int64_t left = a.value_width - column;
      const auto leave = [&](int r, int c, reg sum, reg scale, reg centre) TWOFOUR_INLINED {
        const reg weight = V::all(weights[r]), found = apart(apart(sum * weight) * scale) + centre;
        out.store(first + r, column + c * V::width, weights[r] > 0.0f ? found : weight, left - c * V::width);
      };
      const auto scale = [&](int c) TWOFOUR_INLINED { return V::load_unaligned(room.scales + column + c * V::width); };
      const auto centre = [&](int c) TWOFOUR_INLINED { return V::load_unaligned(room.centres + column + c * V::width); };
      if constexpr (two) {  // seldom, so that it is short
        reg upper[kRows][kColumns];
        for (int r = 0; r < kRows; ++r)
          for (int c = 0; c < kColumns; ++c) upper[r][c] = V::to_real(sums[r][c]) * V::all(256.0f);
        clear(sums);
        multiply(room.rests, plan.score_stride, values, ceil_div(seen, 4), sums);
        float total[kRows][kWide];
        for (int r = 0; r < kRows; ++r)
          for (int c = 0; c < kColumns; ++c)
            V::store_unaligned(total[r] + c * V::width, apart(upper[r][c] + V::to_real(sums[r][c])));
        for (int c = 0; c < kColumns && left > c * V::width; ++c)
#pragma GCC unroll 1
          for (int r = 0; r < rows; ++r) leave(r, c, V::load_unaligned(total[r] + c * V::width), scale(c), centre(c));
        continue;
      }
      TWOFOUR_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        if (left <= c * V::width) break;
        const reg factor = scale(c), middle = centre(c);
        TWOFOUR_UNROLL
        for (int r = 0; r < kRows; ++r) {
          if (r >= rows) break;
          leave(r, c, V::to_real(sums[r][c]), factor, middle);
        }
      }
    }
  }
};

}  // namespace
