// What the refills of layouts share: a rectangle of the dense weight, close together and of the layout's type. The moves
// are sequential along the weight's own rows, so that what is picked from the rectangle comes from L1. Internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "layout.h"
#include "native/integers.h"

namespace {

using twofour::DenseSource;

inline float widened(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}
// To nearest, ties to even; a NaN stays one.
inline uint16_t rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : even);
}

inline void convert(const float* from, float* to, int64_t count) {
  std::memcpy(to, from, static_cast<size_t>(count) * 4);
}
inline void convert(const uint16_t* from, uint16_t* to, int64_t count) {
  std::memcpy(to, from, static_cast<size_t>(count) * 2);
}
inline void convert(const uint16_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; i++) to[i] = widened(from[i]);
}
inline void convert(const float* from, uint16_t* to, int64_t count) {
  for (int64_t i = 0; i < count; i++) to[i] = rounded(from[i]);
}

// Rows [row, row + rows) x columns [column, column + columns) of the weight, zero past `columns`; at most
// kMostRows x 64. Value (r, c) is at r * row_step + c * column_step of `at`.
template <class T, int64_t kMostRows>
struct Rectangle {
  static constexpr int64_t kColumns = 64;
  T at[kMostRows * kColumns];
  int64_t row_step, column_step;

  template <class From>
  void read(const DenseSource& from, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    const auto* values = static_cast<const From*>(from.values) + row * from.row_step + column * from.column_step;
    const bool along = from.column_step == 1;
    row_step = along ? kColumns : 1;
    column_step = along ? 1 : kMostRows;
    if (columns < kColumns) std::memset(at, 0, sizeof at);
    const int64_t lines = along ? rows : columns, length = along ? columns : rows;
    const int64_t from_step = along ? from.row_step : from.column_step, step = along ? kColumns : kMostRows;
    for (int64_t i = 0; i < lines; i++) convert(values + i * from_step, at + i * step, length);
  }
  void load(const DenseSource& from, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    if (from.bf16) read<uint16_t>(from, row, rows, column, columns);
    else read<float>(from, row, rows, column, columns);
  }

  // The 32 kept values of row r, by its canonical indices: nibble g = first index | second index << 2.
  void pick(int64_t r, uint64_t indices, uint8_t* kept) const {
    if (column_step == 1) pick_apart<1>(at + r * kColumns, indices, kept);
    else pick_apart<kMostRows>(at + r, indices, kept);
  }

 private:
  // kStep is a constant because a multiplication for each value costs a fifth.
  template <int64_t kStep>
  static void pick_apart(const T* row, uint64_t indices, uint8_t* kept) {
    for (int g = 0; g < kColumns / 4; g++, row += 4 * kStep, indices >>= 4) {
      const T two[2] = {row[(indices & 3) * kStep], row[(indices >> 2 & 3) * kStep]};
      std::memcpy(kept + g * sizeof two, two, sizeof two);
    }
  }
};

}  // namespace
