// The kept values of a canonical 2:4 weight out of the dense one and back, at places that stay: what training does where
// it holds the kept values alone. Values are moved, whatever they are. Internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "native/integers.h"

namespace {

// Rows [begin, end) of `columns` dense values, a multiple of 4, `stride` from row to row; columns / 2 kept values and
// ceil(columns / 8) bytes of indices a row.
template <class T>
struct KeptRows {
  T* dense;
  int64_t stride, columns;
  const uint8_t* indices;
  T* kept;

  void gather(int64_t begin, int64_t end) const {
    each(begin, end, [](const T* four, unsigned code, T* two) {
      const T pair[2] = {four[code & 3], four[code >> 2]};
      std::memcpy(two, pair, sizeof pair);
    });
  }
  void scatter(int64_t begin, int64_t end) const {
    each(begin, end, [](T* four, unsigned code, const T* two) {
      std::memset(four, 0, 4 * sizeof(T));
      four[code & 3] = two[0];
      four[code >> 2] = two[1];
    });
  }

 private:
  template <class Move>
  void each(int64_t begin, int64_t end, const Move& move) const {
    for (int64_t row = begin; row < end; row++) {
      const uint8_t* codes = indices + row * ceil_div(columns, 8);
      T* four = dense + row * stride;
      T* two = kept + row * (columns / 2);
      const int64_t pairs = columns / 8;
      for (int64_t i = 0; i < pairs; i++, four += 8, two += 4) {
        move(four, codes[i] & 15u, two);
        move(four + 4, codes[i] >> 4, two + 2);
      }
      if (columns % 8 != 0) move(four, codes[pairs] & 15u, two);
    }
  }
};

}  // namespace
