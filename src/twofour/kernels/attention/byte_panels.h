// Keys and values of a head as panels of bytes, which all blocks of its queries read: keys by one range for the head, values by
// one for each column, or bytes by ranges of data as they are. Internal linkage.
#pragma once

#include <cstring>

#include "blocks.h"
#include "kernels/byte_dots.h"
#include "kernels/whole_outputs.h"

namespace {

constexpr float kHidden = -1e3f;  // at most this is added to the score of a key that no query sees

struct BytePanels {
  using V = WholeLanes;
  using E = uint16_t;
  using reg = V::reg;
  using ints = V::ints;
  static constexpr int kColumns = 2;
  static constexpr int64_t kWide = kColumns * V::width;
  static constexpr int64_t kChunk = 4 * V::width;  // bytes of a vector

  // Workspace, in dwords: panels of keys [keys / kWide][width / 4][kWide], for each key -128 times its sum, the middle of
  // each column of the keys; panels of values [value_width / kWide][keys / 4][kWide], scale and middle of each of their
  // columns; a block of queries [rows][row], one of scores [rows][score_stride], in bytes what is left of their weights, likewise, and
  // whether a key is seen.
  struct Plan {
    int64_t width, depth, row, score_stride, columns;
    int64_t keys, sums, middles, values, queries, scores, rests, seen;
    Plan(const Attention& a, int64_t rows)
        : width(ceil_div(a.width, 4)),
          depth(ceil_div(a.keys, 4)),
          row(round_up(a.width, kChunk) / 4),
          score_stride(round_up(a.keys, kChunk) + 16),  // a cache line more, so that rows do not meet in one cache set
          columns(round_up(a.value_width, kWide)),
          keys(round_up(round_up(a.keys, kWide) * width, 16)),
          sums(round_up(round_up(a.keys, kWide), 16)),
          middles(round_up(a.width, kChunk)),
          values(round_up(depth * columns, 16)),
          queries(round_up(rows * row, 16)),
          scores(round_up(rows * score_stride, 16)),
          rests(round_up(ceil_div(rows * score_stride, 4), 16)),
          seen(round_up(ceil_div(a.keys, 4), 16)) {}
    int64_t bytes() const {
      return 4 * (keys + sums + middles + values + 2 * round_up(columns, 16) + queries + scores + rests + seen);
    }
  };

  struct Room {
    uint8_t* keys;
    int32_t* sums;
    float* middles;
    uint8_t* values;
    float *scales, *centres;
    uint8_t* queries;
    float* scores;
    uint8_t *rests, *seen;
    Room(const Plan& plan, char* at)
        : keys(next<uint8_t>(at, plan.keys)), sums(next<int32_t>(at, plan.sums)), middles(next<float>(at, plan.middles)),
          values(next<uint8_t>(at, plan.values)), scales(next<float>(at, round_up(plan.columns, 16))),
          centres(next<float>(at, round_up(plan.columns, 16))), queries(next<uint8_t>(at, plan.queries)),
          scores(next<float>(at, plan.scores)), rests(next<uint8_t>(at, plan.rests)), seen(next<uint8_t>(at, plan.seen)) {}
    template <class T>
    static T* next(char*& at, int64_t dwords) {
      T* here = reinterpret_cast<T*>(at);
      at += 4 * dwords;
      return here;
    }
  };

  // Whether a batch entry has one mask for all queries and heads.
  static bool one_mask(const Attention& a) {
    return (a.mask_strides.row == 0 || a.queries == 1) && (a.mask_strides.head == 0 || a.heads == 1);
  }

  // Of a mask that is one for all queries and heads, which keys it leaves: 1 for each of them. Null where all are seen, where
  // none is, and where queries see different keys.
  static const uint8_t* seen_keys(const Attention& a, int64_t batch, uint8_t* seen) {
    if (a.mask_kind == AttentionMask::none || !one_mask(a)) return nullptr;
    const int64_t at = a.mask_at(batch, 0, 0);
    int64_t count = 0;
    for (int64_t j = 0; j < a.keys; ++j) {
      seen[j] = a.mask_kind == AttentionMask::keep ? static_cast<const uint8_t*>(a.mask)[at + j] != 0
                                                   : !(static_cast<const float*>(a.mask)[at + j] <= kHidden);
      count += seen[j];
    }
    return count == 0 || count == a.keys ? nullptr : seen;
  }

  // Calls use(at), at(row) being where a row begins.
  template <class Use>
  static TWOFOUR_INLINE void with_rows(const Parts<E>& rows, int64_t keys, const Use& use) {
    if (rows.first >= keys && rows.cache.order == nullptr) {
      const E* const begin = rows.cache.begin;
      const int64_t stride = rows.cache.stride;
      use([=](int64_t row) TWOFOUR_INLINED { return begin + row * stride; });
    } else {
      use([&](int64_t row) TWOFOUR_INLINED { return rows.at(row); });
    }
  }

  // The middle of what rows hold in a vector of columns, and how far their ends are from it; NaN and a number where one of
  // them is NaN or an infinity.
  struct Spread {
    reg middle, half;
  };
  template <class At>
  static TWOFOUR_INLINE Spread spread(const At& at, int64_t rows, int64_t column, int64_t count) {
    constexpr int kChains = 4;
    reg low[kChains], high[kChains], broken[kChains];
    if (rows == 0) return {V::zero(), V::zero()};
    TWOFOUR_UNROLL
    for (int i = 0; i < kChains; ++i) low[i] = high[i] = V::load(at(0) + column, count), broken[i] = V::zero();
    const auto see = [&](int i, int64_t row) TWOFOUR_INLINED {
      const reg x = V::load(at(row) + column, count);
      low[i] = V::min(low[i], x), high[i] = V::max(high[i], x), broken[i] = V::fma(x, V::zero(), broken[i]);
    };
    int64_t row = 0;
    for (; row + kChains <= rows; row += kChains) {
      TWOFOUR_UNROLL
      for (int i = 0; i < kChains; ++i) see(i, row + i);
    }
    for (; row < rows; ++row) see(0, row);
    TWOFOUR_UNROLL
    for (int i = 1; i < kChains; ++i)
      low[0] = V::min(low[0], low[i]), high[0] = V::max(high[0], high[i]), broken[0] = broken[0] + broken[i];
    const reg above = apart(high[0] * V::all(0.5f)), below = apart(low[0] * V::all(0.5f));
    return {above + below + broken[0], above - below};
  }
  // The same of the rows that are seen.
  template <class At>
  static TWOFOUR_INLINE Spread spread_seen(const At& at, int64_t rows, const uint8_t* seen, int64_t column, int64_t count) {
    if (seen == nullptr) return spread(at, rows, column, count);
    int64_t first = 0;
    while (!seen[first]) ++first;
    return spread([&](int64_t row) TWOFOUR_INLINED { return at(seen[row] ? row : first); }, rows, column, count);
  }

  // Writes keys (keys, width) as panels of kWide keys side by side, zeros behind the last one, and their sums; returns the
  // step of their bytes, NaN where a key that is seen holds a number that is not finite.
  static float pack_keys(const Attention& a, const Plan& plan, const Parts<E>& k, const uint8_t* seen, const Room& room) {
    constexpr int kWidth = V::width;
    reg widest = V::zero(), broken = V::zero();
    with_rows(k, a.keys, [&](auto at) TWOFOUR_INLINED {
      for (int64_t c = 0; c < a.width; c += kWidth) {
        const Spread found = spread_seen(at, a.keys, seen, c, a.width - c);
        V::store_unaligned(room.middles + c, found.middle);
        broken = V::fma(found.middle, V::zero(), broken);
        widest = V::max(widest, found.half);
      }
    });
    const float step = V::largest(widest) * (1.0f / 127.0f), scale = step < kLeastScale ? kLeastScale : step;
    const reg by = V::all(1.0f / scale);
    key_panels(a, plan, room, [&](int64_t key, int64_t column) TWOFOUR_INLINED {
      return key_bytes(k.at(key), a.width, column, room.middles, by);
    });
    return V::sum(broken) == 0.0f ? scale : __builtin_nanf("");
  }

  // The panels, of what bytes(key, column) returns, and the sums.
  template <class Bytes>
  static TWOFOUR_INLINE void key_panels(const Attention& a, const Plan& plan, const Room& room, const Bytes& bytes) {
    constexpr int kWidth = V::width;
    for (int64_t key = 0; key < round_up(a.keys, kWide); key += kWidth) {
      uint8_t* panel = room.keys + 4 * (key / kWide * kWide * plan.width + key % kWide);
      const int64_t present = least(a.keys - key, kWidth);
      ints sums{};
      for (int64_t cell = 0; cell < plan.width; cell += kWidth) {
        reg t[kWidth];
        for (int i = 0; i < kWidth; ++i) t[i] = i < present ? bytes(key + i, 4 * cell) : V::zero();
        V::transpose(t);
        for (int i = 0; i < least(plan.width - cell, kWidth); ++i) {
          V::store_unaligned(reinterpret_cast<float*>(panel) + (cell + i) * kWide, t[i]);
          sums = dot_bytes<V, false>(sums, all_bytes(0x80), (ints)t[i]);
        }
      }
      V::store_ints(room.sums + key, (ints)(-(V::U)sums));
    }
  }

  // The same of keys that are bytes.
  static void copy_keys(const Attention& a, const Plan& plan, const Parts<uint8_t>& k, const Room& room) {
    key_panels(a, plan, room, [&](int64_t key, int64_t column) TWOFOUR_INLINED {
      return signed_bytes(k.at(key) + column, a.width - column);
    });
  }

  // A vector of bytes around 128 as bytes with a sign, zeros behind the first `count`.
  static TWOFOUR_INLINE reg signed_bytes(const uint8_t* p, int64_t count) {
#if defined(TWOFOUR_SET_avx512)
    const __mmask64 present = count >= kChunk ? ~__mmask64{0} : (__mmask64{1} << count) - 1;
    const __m512i found = _mm512_mask_loadu_epi8(_mm512_set1_epi8(-128), present, p);
    return _mm512_castsi512_ps(_mm512_xor_si512(found, _mm512_set1_epi8(-128)));
#else
    alignas(64) uint8_t bytes[kChunk];
    if (count < kChunk) {
      std::memset(bytes, 0x80, kChunk);
      std::memcpy(bytes, p, static_cast<size_t>(count));
      p = bytes;
    }
    return (reg)((V::U)V::load_ints(p) ^ (V::U)all_bytes(0x80));
#endif
  }

  // The bytes of a key's columns from `column` on, a vector of them; zeros behind the last one.
  static TWOFOUR_INLINE reg key_bytes(const E* key, int64_t width, int64_t column, const float* middles, reg by) {
    ints four[4];
    TWOFOUR_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int64_t c = column + i * V::width;
      four[i] = ints{};
      if (c < width) four[i] = V::to_ints((V::load(key + c, width - c) - V::load_unaligned(middles + c)) * by);
      four[i] = (ints)((V::U)four[i] & 255);
    }
    alignas(64) uint8_t bytes[kChunk];
    V::store_four(bytes, four);
    return V::load_unaligned(reinterpret_cast<const float*>(bytes));
  }

  static TWOFOUR_INLINE ints all_bytes(uint32_t byte) { return (ints)(V::U{} + byte * 0x01010101u); }

  // Writes values (keys, value_width) as panels of kWide columns, four keys in a dword, zeros behind the last one.
  static void pack_values(const Attention& a, const Plan& plan, const Parts<E>& v, const uint8_t* seen, const Room& room) {
    with_rows(v, a.keys, [&](auto at) TWOFOUR_INLINED {
      for (int64_t c = 0; c < plan.columns; c += V::width) {
        auto* panel = reinterpret_cast<int32_t*>(room.values) + c / kWide * kWide * plan.depth + c % kWide;
        if (c >= a.value_width) {
          for (int64_t cell = 0; cell < plan.depth; ++cell) V::store_ints(panel + cell * kWide, ints{});
          continue;
        }
        const int64_t left = a.value_width - c;
        const Spread found = spread_seen(at, a.keys, seen, c, left);
        const reg scale = V::max(found.half * V::all(1.0f / 127.0f), V::all(kLeastScale)), by = V::all(1.0f) / scale;
        V::store_unaligned(room.scales + c, scale);
        V::store_unaligned(room.centres + c, found.middle);
        const auto bytes = [&](int64_t key) TWOFOUR_INLINED {
          return (V::U)V::to_ints((V::load(at(key) + c, left) - found.middle) * by) & 255;
        };
        const int64_t whole = a.keys / 4;
        for (int64_t cell = 0; cell < whole; ++cell) {
          V::U four = bytes(4 * cell);
          TWOFOUR_UNROLL
          for (int i = 1; i < 4; ++i) four |= bytes(4 * cell + i) << 8 * i;
          V::store_ints(panel + cell * kWide, (ints)four);
        }
        if (whole == plan.depth) continue;
        V::U rest{};
        for (int64_t key = 4 * whole; key < a.keys; ++key) rest |= bytes(key) << static_cast<uint32_t>(8 * (key % 4));
        V::store_ints(panel + whole * kWide, (ints)rest);
      }
    });
  }

  // Values that are bytes as such panels; `first`: which column of all values theirs are.
  static void copy_values(const Attention& a, const Plan& plan, const Parts<uint8_t>& v, int64_t first, const Room& room) {
    std::memcpy(room.scales, a.value_steps + first, static_cast<size_t>(4 * a.value_width));
    std::memcpy(room.centres, a.value_middles + first, static_cast<size_t>(4 * a.value_width));
    for (int64_t c = 0; c < plan.columns; c += V::width) {
      auto* panel = reinterpret_cast<int32_t*>(room.values) + c / kWide * kWide * plan.depth + c % kWide;
      const int64_t count = least(a.value_width - c, V::width);  // 0 or less behind the last column
      for (int64_t cell = 0; cell < plan.depth; ++cell) {
        V::U four{};
        TWOFOUR_UNROLL
        for (int i = 0; i < 4; ++i)
          if (count > 0 && 4 * cell + i < a.keys)
            four |= ((V::U)bytes_as_ints(v.at(4 * cell + i) + c, count) ^ 128) << 8 * i;
        V::store_ints(panel + cell * kWide, (ints)four);
      }
    }
  }

  // The first `count` bytes as whole numbers.
  static TWOFOUR_INLINE ints bytes_as_ints(const uint8_t* p, int64_t count) {
#if defined(TWOFOUR_SET_avx512)
    return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(V::mask(count), p));
#else
    uint8_t bytes[V::width]{};
    std::memcpy(bytes, p, count == V::width ? V::width : static_cast<size_t>(count));
    V::I found{};
    for (int i = 0; i < V::width; ++i) found[i] = bytes[i];
    return (ints)found;
#endif
  }
};

}  // namespace
