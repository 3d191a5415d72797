// Where the answers of one head go: numbers of the kernel's type, or bytes by a range. Internal linkage.
#pragma once

#include "cells.h"

namespace {

template <class C>
struct HeadAnswers {
  using V = typename C::V;
  HeadRows<typename C::Element> real;
  HeadRows<uint8_t> whole;
  Rounder<V> rounder;
  bool bytes;

  HeadAnswers(const Attention& a, int64_t batch, int64_t head)
      : real(a.template answer_rows<typename C::Element>(batch, head)),
        whole(a.template answer_rows<uint8_t>(batch, head)),
        rounder(1.0f / a.bytes_scale, a.bytes_zero, 0, 255),
        bytes(a.bytes) {}

  // The first `count` lanes of v, all where it is more, to columns from `column` on.
  TWOFOUR_INLINE void store(int64_t row, int64_t column, typename V::reg v, int64_t count) const {
    if (bytes) V::store_bytes(whole.at(row) + column, rounder(v), least(count, V::width));
    else V::store(real.at(row) + column, v, count);
  }
};

}  // namespace
