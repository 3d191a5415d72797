// A weight of codes as it came through the border, for products and convolutions.
#pragma once

#include <cstring>
#include <limits>

#include "bits.h"
#include "kernels/layouts/packed_weight.h"
#include "native/binding.h"

namespace twofour {

inline const BitsHead& bits_head(const PackedWeight& packed) {
  return *reinterpret_cast<const BitsHead*>(packed.bytes());
}

// What holds of every head that packing writes, and that the bytes behind the header are as many as it says, and `more`.
inline void require_codes(const RowBase& row, const PackedWeight& packed, int64_t more = 0) {
  const BitsLayout& layout = *bits_layout(row.layout);
  const int64_t group = packed.group(), columns = packed.head().columns;
  packed.require_sound(packed.sizes_at_most(8) && packed.behind() >= static_cast<int64_t>(sizeof(BitsHead)));
  packed.require_sound(layout.grouped ? group % kLeastGroup == 0 && group <= kLargestGroup && (group == 0 || columns % group == 0)
                                      : packed.head().group == 0);
  const int64_t bits = bits_head(packed).bits;
  packed.require_sound(layout.takes(bits) && BitsPlaces(layout, packed.head().rows, columns, bits, group, packed.zeros())
                                                     .end == packed.behind() - more);
}

// Whether int32 holds every sum of `columns` products of the weight's own levels with inputs of magnitudes up to `most`
// (codes.py, Levels.longest).
inline bool sum_fits(const PackedWeight& packed, int64_t columns, int64_t most) {
  const BitsHead& head = bits_head(packed);
  const int64_t bits = head.rest[0], alpha = head.rest[1], beta = head.rest[2];
  packed.require_sound(1 <= bits && bits <= 8 && 1 <= alpha && alpha <= 2 && -256 <= beta && beta <= 0);
  const int64_t span = alpha * ((1 << bits) - 1), top = span + beta;
  const int64_t largest = packed.zeros() ? span : top > -beta ? top : -beta;
  return largest == 0 || columns <= std::numeric_limits<int32_t>::max() / (largest * most);
}

// Whether codes of the input and a zero point are those of `most` and `factor`; factor 0 is of inputs that stay real.
inline bool codes_possible(int most, int factor, int zero) {
  if (factor == 0) return most == 255 && zero == 0;
  return 1 <= most && most <= 255 && (most & (most + 1)) == 0 && (factor == 1 || factor == 2) && 0 <= zero && zero <= most;
}

// Whether so many codes are at most `most`, the greatest of some bits: no bit above these is set. Vectors by hand: the greatest
// byte, found by the compiler's loop, took a cycle each.
inline bool codes_within(const char* codes, int64_t count, int most) {
  typedef uint64_t Pair __attribute__((vector_size(16)));
  Pair all[4] = {}, one;
  int64_t i = 0;
  for (; i + 64 <= count; i += 64)
    for (int k = 0; k < 4; k++) std::memcpy(&one, codes + i + 16 * k, 16), all[k] |= one;
  const Pair both = all[0] | all[1] | all[2] | all[3];
  uint64_t any = both[0] | both[1];
  for (; i < count; i++) any |= static_cast<uint8_t>(codes[i]);
  return (any & ~(0x0101010101010101u * static_cast<uint64_t>(most))) == 0;
}

}  // namespace twofour
