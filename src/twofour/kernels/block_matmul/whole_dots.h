// Dots of whole numbers: four bytes of inputs, unsigned, by four of weights; the sums are exact. real_dots.h says what a
// Dots type has; B adds the dot product. Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>

#include "blocks.h"
#include "kernels/whole_outputs.h"

namespace {

struct WholeDots {
  using V = WholeLanes;
  using Sum = V::ints;
  using Token = Range;
  static constexpr int per = 4;

  static TWOFOUR_INLINE Sum add(Sum a, Sum b) { return V::add(a, b); }
  static TWOFOUR_INLINE void copy_token(const Matmul& a, int64_t token, char* to, Token* kept) {
    *kept = ::copy_token<V>(a, token, reinterpret_cast<uint8_t*>(to), 8);
  }
  static TWOFOUR_INLINE void finish(const Matmul& a, const Blocks& b, const Sum* sums, const Token* kept, int64_t first,
                                    int64_t tokens, int64_t unit) {
    const int64_t row = b.shape.row(unit), end = row + b.shape.rows(unit);
    finish_sums<V>(a, {b.scales, b.sums}, reinterpret_cast<const int32_t*>(sums), kBlockUnit / V::width, tokens,
                   kept - first, first, tokens, row, end);
  }
};

}  // namespace
