// Layouts: the orders in which kernels want a packed 2:4 weight. A table of sizes and conversions from and to the
// canonical form (docs/formats.md).
#pragma once

#include <cstdint>

namespace twofour {

struct WeightShape {
  int64_t out, in;  // out >= 1, in a positive multiple of 4
  int64_t group;    // inputs per scale: 0 without scales or with one per row
  bool zeros;       // groups have zero points too
};

// The canonical form. values: out x in/2 kept values in order (float, bfloat16, int8, or two int4 a byte, low first);
// indices: out x ceil(in/8) bytes, one nibble per group of four, low nibble first, its low two bits the first index.
// scales, zeros: out x (in / group, or 1) floats, null where the encoding has none.
struct CanonicalWeight {
  const void* values;
  const uint8_t* indices;
  const float* scales;
  const float* zeros;
};
struct CanonicalOutput {
  void* values;
  uint8_t* indices;
  float* scales;
  float* zeros;
};

// Where new values of a packed weight stand. Dense: value (row, column) at row * row_step + column * column_step; one of
// the steps is 1. With indices: kept values alone, canonical, of the weight (column_step 1) or of its transpose (row_step
// 1); the other step is from row to row of them. bfloat16, or float32, which bfloat16 layouts round.
struct ValueSource {
  const void* values;
  bool bf16;
  int64_t row_step, column_step;
  const uint8_t* indices;  // rows of as many bytes as the canonical form has for so many values; null: dense
};
constexpr int64_t kRefillRows = 384;  // rows of a refill start at a multiple

struct Layout {
  const char* name;
  const char* dtype;
  int64_t (*bytes)(const WeightShape&);  // a multiple of 64
  // Writes every byte of `packed`.
  void (*pack)(const WeightShape&, const CanonicalWeight&, void* packed);
  // The inverse; the unused nibble of a row with an odd number of groups becomes 0.
  void (*unpack)(const WeightShape&, const void* packed, const CanonicalOutput&);
  bool columns;  // whether its kernels take activations transposed, (in_features, tokens)
  // Writes new values of rows [begin, end) at the places that stay kept; null where that is not built. Metadata stay.
  void (*refill)(const WeightShape&, const ValueSource&, int64_t begin, int64_t end, void* packed);
};

#define TWOFOUR_NM_LAYOUT(name, ...)                                                              \
  int64_t name##_layout__bytes(const WeightShape& shape);                                         \
  void name##_layout__pack(const WeightShape& shape, const CanonicalWeight& from, void* packed);  \
  void name##_layout__unpack(const WeightShape& shape, const void* packed, const CanonicalOutput& to);
#include "layout.inc"
#undef TWOFOUR_NM_LAYOUT

#define TWOFOUR_NM_REFILL(name)                                                                             \
  void name##_layout__refill(const WeightShape& shape, const ValueSource& from, int64_t begin, int64_t end, \
                             void* packed);
TWOFOUR_NM_REFILL(panels)
TWOFOUR_NM_REFILL(pairs)
TWOFOUR_NM_REFILL(bf16_panels)
#undef TWOFOUR_NM_REFILL

// The layout of that name, or null.
const Layout* layout_called(const char* name);

}  // namespace twofour
