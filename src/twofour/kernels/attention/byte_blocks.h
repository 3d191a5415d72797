// Attention of one head at a time in whole numbers, operands and answers in bfloat16: queries become bytes by a range for
// each of them, keys by one for the head, values by one for each column; or they are bytes by ranges of data. Both products are
// exact sums of int32. README.md has the formulas. Internal linkage.
#pragma once

#include <cmath>
#include <cstring>

#include "byte_weights.h"
#include "few_queries.h"
#include "kernels/whole_outputs.h"

namespace {

constexpr float kHidden = -1e3f;  // at most this is added to the score of a key that no query sees

// The most that scores of a query may be off: the standard deviation of what rounding adds, at most 127 sqrt(width / 6) units.
// Of more the query is computed in floats.
constexpr float kMostNoise = 0.5f;
inline float coarsest_unit(int64_t width) {
  return kMostNoise * kLog2E / (127.0f * std::sqrt(static_cast<float>(width) / 6.0f));
}

// `kRows` queries by two vectors of keys (or of value columns) are summed in registers.
template <int kRows>
struct ByteBlocks {
  using V = WholeLanes;
  using E = uint16_t;
  using reg = V::reg;
  using ints = V::ints;
  static constexpr int kColumns = 2;
  static constexpr int kBeside = kRows % 4 == 0 ? 4 : 2;  // rows that are looked at side by side: their latencies overlap
  static constexpr int64_t kWide = kColumns * V::width;
  static constexpr int64_t kChunk = 4 * V::width;  // bytes of a vector

  // Workspace, in dwords: panels of keys [keys / kWide][width / 4][kWide], for each key -128 times its sum, the middle of
  // each column of the keys; panels of values [value_width / kWide][keys / 4][kWide], scale and middle of each of their
  // columns; a block of queries [kRows][row], one of scores [kRows][score_stride], in bytes what is left of their weights, likewise, and
  // whether a key is seen.
  struct Plan {
    int64_t width, depth, row, score_stride, columns;
    int64_t keys, sums, middles, values, queries, scores, rests, seen;
    explicit Plan(const Attention& a)
        : width(ceil_div(a.width, 4)),
          depth(ceil_div(a.keys, 4)),
          row(round_up(a.width, kChunk) / 4),
          score_stride(round_up(a.keys, kChunk) + 16),  // a cache line more, so that rows do not meet in one cache set
          columns(round_up(a.value_width, kWide)),
          keys(round_up(round_up(a.keys, kWide) * width, 16)),
          sums(round_up(round_up(a.keys, kWide), 16)),
          middles(round_up(a.width, kChunk)),
          values(round_up(depth * columns, 16)),
          queries(round_up(kRows * row, 16)),
          scores(round_up(kRows * score_stride, 16)),
          rests(round_up(ceil_div(kRows * score_stride, 4), 16)),
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

  static int64_t bytes(const Attention& a) { return Plan(a).bytes(); }

  static void run(const Attention& a, int64_t begin, int64_t end, void* workspace) {
    const Plan plan(a);
    const Room room(plan, static_cast<char*>(workspace));
    const float coarsest = coarsest_unit(a.width);
    float scale = 0.0f;  // of the keys
    for (int64_t item = begin, packed = -1; item < end; ++item) {
      const int64_t batch = item / a.heads, head = item % a.heads, key_head = head / (a.heads / a.key_heads);
      const bool whole = a.units != nullptr;  // operands are bytes
      if (const int64_t source = batch * a.key_heads + key_head; source != packed) {
        if (whole) {
          copy_keys(a, plan, a.template key_rows<uint8_t>(batch, key_head), room);
          copy_values(a, plan, a.template value_rows<uint8_t>(batch, key_head), key_head * a.value_width, room);
        } else {
          const uint8_t* seen = seen_keys(a, batch, room.seen);
          scale = pack_keys(a, plan, a.template key_rows<E>(batch, key_head), seen, room);
          pack_values(a, plan, a.template value_rows<E>(batch, key_head), seen, room);
        }
        packed = source;
      }
      const HeadRows<const E> q = a.template query_rows<E>(batch, head);
      const HeadAnswers<FloatCells<E>> out(a, batch, head);
      for (int64_t first = 0; first < a.queries; first += kRows) {
        const int64_t rows = least(a.queries - first, kRows), seen = a.causal ? least(first + rows, a.keys) : a.keys;
        float units[kRows], weights[kRows]{};
        bool lost[kRows]{}, some = false, coarse = false;
        Queries queries{room.queries, 4 * plan.row};
        if (whole) queries = queries_of(a, plan, a.template query_rows<uint8_t>(batch, head), head, first, rows, room, units);
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
            FewQueries<FloatCells<E>>::run_row(a, batch, head, q, a.template key_rows<E>(batch, key_head),
                                               a.template value_rows<E>(batch, key_head), out, first + r, room.scores);
      }
    }
  }

  // Of a mask that is one for all queries and heads, which keys it leaves: 1 for each of them. Null where all are seen, where
  // none is, and where queries see different keys.
  static const uint8_t* seen_keys(const Attention& a, int64_t batch, uint8_t* seen) {
    const bool alike = (a.mask_strides.row == 0 || a.queries == 1) && (a.mask_strides.head == 0 || a.heads == 1);
    if (a.mask_kind == AttentionMask::none || !alike) return nullptr;
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
      V::store_ints(room.sums + key, (ints)(-(typename V::U)sums));
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
    return (reg)((typename V::U)V::load_ints(p) ^ (typename V::U)all_bytes(0x80));
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
      four[i] = (ints)((typename V::U)four[i] & 255);
    }
    alignas(64) uint8_t bytes[kChunk];
    V::store_four(bytes, four);
    return V::load_unaligned(reinterpret_cast<const float*>(bytes));
  }

  static TWOFOUR_INLINE ints all_bytes(uint32_t byte) { return (ints)(typename V::U{} + byte * 0x01010101u); }

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
          return (typename V::U)V::to_ints((V::load(at(key) + c, left) - found.middle) * by) & 255;
        };
        const int64_t whole = a.keys / 4;
        for (int64_t cell = 0; cell < whole; ++cell) {
          typename V::U four = bytes(4 * cell);
          TWOFOUR_UNROLL
          for (int i = 1; i < 4; ++i) four |= bytes(4 * cell + i) << 8 * i;
          V::store_ints(panel + cell * kWide, (ints)four);
        }
        if (whole == plan.depth) continue;
        typename V::U rest{};
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
        typename V::U four{};
        TWOFOUR_UNROLL
        for (int i = 0; i < 4; ++i)
          if (count > 0 && 4 * cell + i < a.keys)
            four |= ((typename V::U)bytes_as_ints(v.at(4 * cell + i) + c, count) ^ 128) << 8 * i;
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
    typename V::I found{};
    for (int i = 0; i < V::width; ++i) found[i] = bytes[i];
    return (ints)found;
#endif
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
            four[part] = (ints)((typename V::U)V::to_ints(V::load(from[i] + at, a.width - at) * factor) + 128);
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
      odd = odd + (reg)((typename V::I)(s != s) & (typename V::I)V::all(1.0f));
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
