// Attention for so few queries that arranging keys and values would cost more than the products: decoding. Internal
// linkage.
#pragma once

#include <cstring>

#include "blocks.h"

namespace {

constexpr int64_t kFewQueries = 3;
constexpr int64_t kAhead = 32;  // rows: 8 KB of 64 floats

template <class C>
struct FewQueries {
  using V = typename C::V;
  using E = typename C::Element;
  using reg = typename V::reg;

  static int64_t bytes(const Attention& a) { return 4 * round_up(a.keys, 16); }

  static void run(const Attention& all, int64_t begin, int64_t end, float* scores) {
    Attention a = all;
    for (int64_t item = begin, masked_at = -1; item < end; ++item) {
      const int64_t batch = item / a.heads, head = item % a.heads, key_head = head / (a.heads / a.key_heads);
      const int64_t offset = all.mask_kind == AttentionMask::none ? 0 : all.mask_at(batch, head, 0);
      if (offset != masked_at) a = without_hidden(all, offset), masked_at = offset;
      const HeadRows<const E> q = a.template query_rows<E>(batch, head);
      const Parts<E> k = a.template key_rows<E>(batch, key_head), v = a.template value_rows<E>(batch, key_head);
      const HeadAnswers<C> out(a, batch, head);
      for (int64_t row = 0; row < a.queries; ++row) run_row(a, batch, head, q, k, v, out, row, scores);
    }
  }

  // The call without a mask of bytes that hides keys of the cache at both ends alone, those keys left out: memory behind a
  // cache is for tokens to come, and weights between two calls have emptied the caches that it would be read through.
  static Attention without_hidden(Attention a, int64_t offset) {
    if (a.mask_kind != AttentionMask::keep || a.queries != 1 || a.order != nullptr || a.drop_below != 0 || a.causal) return a;
    const auto* mask = static_cast<const uint8_t*>(a.mask) + offset;
    const auto hides = [&](int64_t from, int64_t to) { return std::memchr(mask + from, 0, static_cast<size_t>(to - from)) != nullptr; };
    int64_t first = 0, last = a.first_keys;
    while (first < last && mask[first] == 0) ++first;
    while (last > first && mask[last - 1] == 0) --last;
    const int64_t added = a.keys - a.first_keys;
    if (last - first + added == 0 || hides(first, last) || hides(a.first_keys, a.keys)) return a;
    a.k = static_cast<const E*>(a.k) + first * a.k_strides.row;
    a.v = static_cast<const E*>(a.v) + first * a.v_strides.row;
    a.first_keys = last - first, a.keys = a.first_keys + added;
    a.mask_kind = AttentionMask::none;
    return a;
  }

  static TWOFOUR_NOINLINE void run_row(const Attention& a, int64_t batch, int64_t head, const HeadRows<const E>& q,
                                       const Parts<E>& k, const Parts<E>& v, const HeadAnswers<C>& out, int64_t row,
                                       float* scores) {
    const int64_t seen = a.causal && row + 1 < a.keys ? row + 1 : a.keys;
    score(a, q.at(row), k, v, seen, scores);
    float weight = softmax<C>(a, batch, head, row, 0, seen, scores);
    if (a.drop_below != 0) drop<C>(a, batch, head, row, seen, 1.0f, scores), weight *= a.kept_factor();
    weigh(a, scores, v, seen, weight, out, row);
  }

  // Asks for a row that is read kAhead rows later: keys, then values.
  static TWOFOUR_INLINE void fetch(const Parts<E>& rows, int64_t row, int64_t width) {
    const char* at = reinterpret_cast<const char*>(rows.at(row));
    for (int64_t byte = 0; byte < width * static_cast<int64_t>(sizeof(E)); byte += 64) __builtin_prefetch(at + byte);
  }

  // As many keys at once as a vector holds: their dot products are summed across by one transposition.
  static void score(const Attention& a, const E* q, const Parts<E>& k, const Parts<E>& v, int64_t seen, float* scores) {
    const reg scale = V::all(a.scale * kLog2E);
    for (int64_t key = 0; key < seen; key += V::width) {
      reg dots[V::width];
      const E* rows[V::width];
      for (int i = 0; i < V::width; ++i) {
        const int64_t row = key + i < seen ? key + i : seen - 1;
        dots[i] = V::zero(), rows[i] = k.at(row);
        if (const int64_t later = key + i + kAhead; later < seen) fetch(k, later, a.width);
        else if (later < 2 * seen) fetch(v, later - seen, a.value_width);
      }
      for (int64_t c = 0; c < a.width; c += V::width) {
        const int64_t left = a.width - c < V::width ? a.width - c : V::width;
        const reg x = V::load_partial(q + c, left) * scale;
#pragma GCC unroll 16
        for (int i = 0; i < V::width; ++i) dots[i] = V::fma(x, V::load_partial(rows[i] + c, left), dots[i]);
      }
      V::transpose(dots);
      reg total = dots[0];
#pragma GCC unroll 16
      for (int i = 1; i < V::width; ++i) total = total + dots[i];
      V::store_unaligned(scores + key, total);
    }
  }

  // Four vectors of value columns at a time, two keys deep, so that eight sums hide the latency of the adder.
  static void weigh(const Attention& a, const float* scores, const Parts<E>& v, int64_t seen, float weight,
                    const HeadAnswers<C>& out, int64_t row) {
    constexpr int kColumns = 4;
    for (int64_t column = 0; column < a.value_width; column += kColumns * V::width) {
      reg even[kColumns], odd[kColumns];
      int64_t counts[kColumns];
      for (int c = 0; c < kColumns; ++c) {
        const int64_t left = a.value_width - column - c * V::width;
        counts[c] = left < 0 ? 0 : left < V::width ? left : V::width;
        even[c] = odd[c] = V::zero();
      }
      int64_t key = 0;
      for (; key + 1 < seen; key += 2) {
        const E *from = v.at(key) + column, *behind = v.at(key + 1) + column;
        const reg p = V::all(scores[key]), next = V::all(scores[key + 1]);
        if (key + kAhead + 1 < seen && column == 0) fetch(v, key + kAhead, a.value_width), fetch(v, key + kAhead + 1, a.value_width);
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) {
          even[c] = V::fma(p, V::load_partial(from + c * V::width, counts[c]), even[c]);
          odd[c] = V::fma(next, V::load_partial(behind + c * V::width, counts[c]), odd[c]);
        }
      }
      for (int c = 0; c < kColumns; ++c) {
        reg sum = even[c] + odd[c];
        if (key < seen) {
          const E* last = v.at(key) + column + c * V::width;
          sum = V::fma(V::all(scores[key]), V::load_partial(last, counts[c]), sum);
        }
        if (counts[c] > 0) out.store(row, column + c * V::width, sum * V::all(weight), counts[c]);
      }
    }
  }
};

}  // namespace
