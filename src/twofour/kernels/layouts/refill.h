// What the refills of layouts share: a rectangle of the weight, close together and of the layout's type. The moves are
// sequential along the weight's own rows, so that what is picked from the rectangle comes from L1. Internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "canonical.h"
#include "layout.h"
#include "native/integers.h"

namespace {

using twofour::ValueSource;

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

inline void convert(float from, float* to) { *to = from; }
inline void convert(uint16_t from, uint16_t* to) { *to = from; }
inline void convert(uint16_t from, float* to) { *to = widened(from); }
inline void convert(float from, uint16_t* to) { *to = rounded(from); }

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
  void read(const ValueSource& from, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    const auto* values = static_cast<const From*>(from.values) + row * from.row_step + column * from.column_step;
    const bool along = from.column_step == 1;
    row_step = along ? kColumns : 1;
    column_step = along ? 1 : kMostRows;
    if (columns < kColumns) std::memset(at, 0, sizeof at);
    const int64_t lines = along ? rows : columns, length = along ? columns : rows;
    const int64_t from_step = along ? from.row_step : from.column_step, step = along ? kColumns : kMostRows;
    for (int64_t i = 0; i < lines; i++) convert(values + i * from_step, at + i * step, length);
  }
  void load(const ValueSource& from, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    if (from.bf16) read<uint16_t>(from, row, rows, column, columns);
    else read<float>(from, row, rows, column, columns);
  }

  const T& value(int64_t r, int64_t c) const { return at[r * row_step + c * column_step]; }
  // The 32 kept values of row r, by its indices in the layout's order: nibble g = first index | second index << 2.
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

// The same of a source of kept values: what is kept of a rectangle, and the second index of every pair where places are
// looked up. At most kMostRows x 64 again; lines are those of the canonical form, rows of the rectangle or, turned, its
// columns. kByPlace: whether `value` is asked.
template <class T, int64_t kMostRows, bool kByPlace>
struct KeptRectangle {
  static constexpr int64_t kColumns = 64;
  static constexpr int64_t kLines = kMostRows > kColumns ? kMostRows : kColumns;
  static constexpr int64_t kGroups = kLines / 4;  // of a line at most
  T at[kLines * kGroups * 2];                     // line by line
  uint8_t seconds[kLines * kGroups];
  bool turned;

  template <class From>
  void read(const ValueSource& from, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    turned = from.column_step != 1;
    if (columns < kColumns) std::memset(at, 0, sizeof at);
    const int64_t kept = turned ? from.column_step : from.row_step;
    const int64_t lines = turned ? columns : rows, groups = (turned ? rows : columns) / 4;
    const int64_t line = turned ? column : row, group = (turned ? row : column) / 4;
    for (int64_t i = 0; i < lines; i++) {
      convert(static_cast<const From*>(from.values) + (line + i) * kept + 2 * group, at + i * kGroups * 2, 2 * groups);
      const uint8_t* codes = from.indices + (line + i) * ceil_div(kept, 4) + group / 2;
      if (kByPlace || turned) find_seconds(codes, groups, seconds + i * kGroups);
    }
  }
  void load(const ValueSource& from, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    if (from.bf16) read<uint16_t>(from, row, rows, column, columns);
    else read<float>(from, row, rows, column, columns);
  }

  // Of a value that is kept; of another one, its neighbour.
  const T& value(int64_t r, int64_t c) const { return turned ? of_line(c, r) : of_line(r, c); }
  void pick(int64_t r, uint64_t indices, uint8_t* kept) const {
    if (turned) {
      pick_pairs(indices, kept, [&](int64_t g, unsigned first, unsigned second, T* two) {
        two[0] = of_line(4 * g + first, r);
        two[1] = of_line(4 * g + second, r);
      });
    } else if (sizeof(T) == 4) {  // no float layout has an order of its own
      std::memcpy(kept, at + r * kGroups * 2, kColumns / 2 * sizeof(T));
    } else {
      const T* line = at + r * kGroups * 2;
      pick_pairs(indices, kept, [line](int64_t g, unsigned first, unsigned second, T* two) {
        const bool swap = first > second;
        two[0] = line[2 * g + swap];
        two[1] = line[2 * g + !swap];
      });
    }
  }

 private:
  // Rectangles start at whole bytes of the codes: at a multiple of 8 places.
  static void find_seconds(const uint8_t* codes, int64_t groups, uint8_t* to) {
    for (int64_t g = 0; g + 1 < groups; g += 2) {
      const unsigned code = codes[g / 2];
      to[g] = code >> 2 & 3;
      to[g + 1] = static_cast<uint8_t>(code >> 6);
    }
    if (groups % 2 != 0) to[groups - 1] = codes[groups / 2] >> 2 & 3;
  }
  template <class Pick>
  static void pick_pairs(uint64_t indices, uint8_t* kept, const Pick& pick) {
    for (int64_t g = 0; g < kColumns / 4; g++, indices >>= 4) {
      T two[2];
      pick(g, indices & 3, indices >> 2 & 3, two);
      std::memcpy(kept + g * sizeof two, two, sizeof two);
    }
  }
  const T& of_line(int64_t line, int64_t place) const {
    const int64_t group = line * kGroups + place / 4;
    return at[group * 2 + (seconds[group] == place % 4)];
  }
};

}  // namespace
