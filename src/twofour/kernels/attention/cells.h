// What a panel of attention is made of. A cell is four bytes: one number as a float, or two neighbouring bfloat16 that
// one instruction multiplies and adds. `step` is how many numbers a cell holds along the sum. Internal linkage.
#pragma once

#include "attention.h"
#include "kernels/whole_lanes.h"
#include "native/integers.h"
#include "native/vector_exp.h"

namespace {

using twofour::Attention;
using twofour::AttentionMask;
using twofour::HeadRows;
using twofour::Parts;

// Cells of one number; operands of float or bfloat16 (uint16_t) become floats as they are arranged.
template <class Number>
struct FloatCells {
  using V = WholeLanes;
  using Element = Number;
  using reg = V::reg;
  static constexpr int step = 1;
  static constexpr bool scaled_queries = true;  // else the scores are multiplied by the scale

  static reg load(const Element* p, int64_t count) { return V::load_partial(p, count); }
  static reg load_column(const Element* row, const Element*, int64_t count) { return V::load_partial(row, count); }
  static reg multiply_add(reg a, reg b, reg c) { return V::fma(a, b, c); }
  // 2^x; an answer in bfloat16 (rounded to 2^-8) does not show the error of a shorter polynomial.
  static reg exp2(reg x) { return sizeof(Element) == 2 ? exp2_rough<V>(x) : exp2_of<V>(x); }
  static void store_weights(float* row, int64_t at, reg p, int64_t count) {
    if (count == V::width) V::store_unaligned(row + at, p);
    else V::store_partial(row + at, p, count);
  }
  static void clear_weights(float* row, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) row[i] = 0.0f;
  }
};

}  // namespace
