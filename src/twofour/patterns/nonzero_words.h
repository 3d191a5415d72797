// What the rows of nm_nonzero share: 64 values at a time become one word of bits. Internal linkage.
#pragma once

#include <cstring>

#include "nm_nonzero.h"

namespace twofour {
namespace {

// Of up to 64 values, bit i for value i: not zero, -0.0, NaN or infinite.
struct NonzeroWords {
  uint64_t nonzero, negative, broken;
};

// Runs word(values) on every 64 values; the last ones are copied to a block that is zero behind them.
template <class Value, class Word>
inline NmNonzeroCounts nonzero_words(const NmNonzero& a, const Word& word) {
  NmNonzeroCounts found = {};
  const auto* values = static_cast<const Value*>(a.values);
  for (int64_t i = 0; i < a.count; i += 64) {
    const int64_t left = a.count - i;
    Value last[64] = {};
    if (left < 64) std::memcpy(last, values + i, static_cast<size_t>(left) * sizeof(Value));
    const NonzeroWords w = word(left < 64 ? last : values + i);
    std::memcpy(a.bits + i / 8, &w.nonzero, left < 64 ? static_cast<size_t>((left + 7) / 8) : 8);
    found.nonzero += __builtin_popcountll(w.nonzero);
    found.negative += __builtin_popcountll(w.negative);
    found.broken += __builtin_popcountll(w.broken);
  }
  return found;
}

}  // namespace
}  // namespace twofour
