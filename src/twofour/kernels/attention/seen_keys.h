// Which keys a block of queries sees: a mask of bytes often hides all before and behind them (windows that slide along a
// sequence, padding, sequences one behind the other), and what nobody sees is not computed. Internal linkage.
#pragma once

#include <cstring>

#include "attention.h"
#include "native/integers.h"

namespace {

using twofour::Attention;
using twofour::AttentionMask;

// Keys [begin, end), where begin is a multiple of a panel's width. `all`: every query of the block sees each of them.
struct SeenKeys {
  int64_t begin, end;
  bool all;
  int64_t count() const { return end - begin; }
};

// Whether bytes [0, count) hide every key, 64 at a time.
inline bool hides_all(const uint8_t* mask, int64_t count) {
  int64_t i = 0;
  for (; i + 64 <= count; i += 64) {
    uint8_t any = 0;
    for (int64_t k = 0; k < 64; ++k) any |= mask[i + k];
    if (any != 0) return false;
  }
  for (; i < count; ++i)
    if (mask[i] != 0) return false;
  return true;
}

// The keys that queries [row, row + rows) of a head see, of whole panels of `wide` at their beginning; all keys where none
// is seen, since such a query has an answer of its own. With dropout all keys too: a weight's bits follow from its place.
inline SeenKeys seen_keys(const Attention& a, int64_t batch, int64_t head, int64_t row, int64_t rows, int64_t wide) {
  const int64_t keys = a.causal ? least(row + rows, a.keys) : a.keys;
  const SeenKeys whole{0, keys, a.mask_kind == AttentionMask::none && !a.causal};
  if (a.mask_kind != AttentionMask::keep || a.drop_below != 0) return whole;
  int64_t begin = whole.end, end = 0;
  bool all = !a.causal;
  const auto* mask = static_cast<const uint8_t*>(a.mask) + a.mask_at(batch, head, row);
  const int64_t different = a.mask_strides.row == 0 ? 1 : rows;
  for (int64_t r = 0; r < different; ++r) {
    const uint8_t* keys = mask + r * a.mask_strides.row;
    int64_t first = 0;
    while (first < begin && hides_all(keys + first, least(begin - first, wide))) first += wide;
    begin = least(begin, first);
    int64_t last = whole.end;
    while (last > end) {
      const int64_t from = (last - 1) / wide * wide;
      if (!hides_all(keys + from, last - from)) break;
      last = from;
    }
    while (last > end && keys[last - 1] == 0) --last;
    end = last > end ? last : end;
  }
  if (begin >= end) return whole;
  for (int64_t r = 0; r < different && all; ++r)
    all = std::memchr(mask + r * a.mask_strides.row + begin, 0, static_cast<size_t>(end - begin)) == nullptr;
  return {begin, end, all};
}

}  // namespace
