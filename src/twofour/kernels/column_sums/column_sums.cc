// The row, once for every instruction set.
#include "column_sums.h"
#include "native/integers.h"
#include "native/simd.h"

namespace {

using twofour::ColumnSums;

constexpr int64_t kBlock = 64, kBeside = 8;  // rows of a partial sum, rows that are added at once

// Rows are read from memory in order, as it likes to be read; the sums of all columns stay in the first cache. Those of a
// block are formed apart, so that a column's error does not grow with its length but with that over 64.
template <class T>
void sum_rows(const ColumnSums& a) {
  using V = Lanes;
  constexpr int64_t kColumns = 4096;
  float part[kColumns];
  for (int64_t c0 = a.begin; c0 < a.end; c0 += kColumns) {
    const int64_t columns = least(a.end - c0, kColumns);
    for (int64_t row = 0; row < a.rows || row == 0; row += kBlock) {
      const int64_t stop = least(row + kBlock, a.rows);
      for (int64_t c = 0; c < columns; c += V::width) V::store(part + c, V::zero(), columns - c);
      for (int64_t r = row; r < stop; r += kBeside) {
        const T* from = static_cast<const T*>(a.from) + r * a.stride + c0;
        const int64_t beside = least(stop - r, kBeside);
        for (int64_t c = 0; c < columns; c += V::width) {
          typename V::reg sum = V::load(part + c, columns - c);
          for (int64_t i = 0; i < beside; ++i) sum = sum + V::load(from + i * a.stride + c, columns - c);
          V::store(part + c, sum, columns - c);
        }
      }
      for (int64_t c = 0; c < columns; c += V::width) {
        const int64_t left = columns - c;
        const typename V::reg before = row == 0 ? V::zero() : V::load(a.sums + c0 + c, left);
        V::store(a.sums + c0 + c, before + V::load(part + c, left), left);
      }
    }
    for (int64_t c = 0; a.over != 1.0f && c < columns; c += V::width) {
      const int64_t left = columns - c;
      V::store(a.sums + c0 + c, V::load(a.sums + c0 + c, left) / V::all(a.over), left);
    }
  }
}

}  // namespace

namespace twofour {

void TWOFOUR_HERE(column_sums)(const ColumnSums& a) {
  if (a.bf16) sum_rows<uint16_t>(a);
  else sum_rows<float>(a);
}

}  // namespace twofour
