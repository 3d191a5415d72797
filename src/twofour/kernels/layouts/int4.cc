// Packing a 2:4 int4 weight to and from its kernels' layout: portable, nothing outside the buffers touched.
#include "int4.h"

#include <cstring>

#include "canonical.h"
#include "layout.h"

namespace twofour {
namespace {

Int4Unit unit_of(const WeightShape& shape) { return {shape.in, shape.group, shape.zeros, kInt4BlockBytes}; }

// One row of one block; returns the sum of its values less their zero point.
int pack_row(const uint8_t* values, const uint8_t* codes, int64_t kept, int zero, int64_t lane, uint8_t* half) {
  std::memcpy(half + lane * 4, codes, 4);
  int sum = 0;
  for (int64_t i = 0; i < kInt4Tile / 2; i++) {
    const int value = i < kept ? half_byte(values, i) ^ kInt4Offset : zero;
    sum += value - zero;
    Int4Place(lane, i).write(half + 64, value);
  }
  return sum;
}

// Row `row` of the weight, or a row of zeros past its end (from.values unread there).
void pack_unit_row(const WeightShape& shape, const CanonicalWeight& from, int64_t row, int64_t in_unit, uint8_t* unit) {
  const Int4Unit at = unit_of(shape);
  const Canonical canonical{shape.in};
  const bool real = row < shape.out;
  const auto* values = static_cast<const uint8_t*>(from.values) + row * ceil_div(shape.in / 2, 2);
  float total = 0.0f;
  for (int64_t t = 0; t < at.tiles; t++) {
    const int64_t group = t / at.group_tiles, k = t * kInt4Tile;
    const float scale = real ? from.scales[row * at.groups + group] : 1.0f;
    const int zero = kInt4Offset + (real && shape.zeros ? static_cast<int>(from.zeros[row * at.groups + group]) : 0);
    const uint16_t stored = to_stored_scale(scale);
    std::memcpy(unit + at.scales + (group * kInt4Rows + in_unit) * 2, &stored, 2);
    if (shape.zeros) unit[at.zeros + group * kInt4Rows + in_unit] = static_cast<uint8_t>(zero);
    uint8_t codes[kInt4Tile / 8];
    canonical.read(from.indices + (real ? row * canonical.bytes_per_row() : 0), real ? k : shape.in, kInt4Tile, codes);
    uint8_t* half = unit + at.blocks + t * kInt4BlockBytes + in_unit / kInt4Half * kInt4HalfBytes;
    const int64_t kept = real ? least(kInt4Tile, shape.in - k) / 2 : 0;
    total += from_stored_scale(stored) *
             static_cast<float>(pack_row(values + k / 4, codes, kept, zero, in_unit % kInt4Half, half));
  }
  std::memcpy(unit + in_unit * 4, &total, 4);
}

void unpack_unit_row(const WeightShape& shape, const uint8_t* unit, int64_t row, int64_t in_unit,
                     const CanonicalOutput& to) {
  const Int4Unit at = unit_of(shape);
  const Canonical canonical{shape.in};
  const int64_t row_bytes = ceil_div(shape.in / 2, 2), lane = in_unit % kInt4Half;
  uint8_t* values = static_cast<uint8_t*>(to.values) + row * row_bytes;
  std::memset(values, 0, static_cast<size_t>(row_bytes));
  for (int64_t g = 0; g < at.groups; g++) {
    uint16_t stored;
    std::memcpy(&stored, unit + at.scales + (g * kInt4Rows + in_unit) * 2, 2);
    to.scales[row * at.groups + g] = from_stored_scale(stored);
    if (shape.zeros)
      to.zeros[row * at.groups + g] = static_cast<float>(unit[at.zeros + g * kInt4Rows + in_unit] - kInt4Offset);
  }
  for (int64_t t = 0; t < at.tiles; t++) {
    const int64_t k = t * kInt4Tile;
    const uint8_t* half = unit + at.blocks + t * kInt4BlockBytes + in_unit / kInt4Half * kInt4HalfBytes;
    canonical.write(to.indices + row * canonical.bytes_per_row(), k, kInt4Tile, half + lane * 4);
    for (int64_t i = 0; i < least(kInt4Tile, shape.in - k) / 2; i++) {
      const int value = Int4Place(lane, i).read(half + 64) ^ kInt4Offset;
      uint8_t* byte = values + (k / 2 + i) / 2;
      *byte = static_cast<uint8_t>(*byte | value << (i % 2 * 4));
    }
  }
}

}  // namespace

int64_t int4_rows_layout__bytes(const WeightShape& shape) {
  return ceil_div(shape.out, kInt4Rows) * unit_of(shape).bytes;
}

void int4_rows_layout__pack(const WeightShape& shape, const CanonicalWeight& from, void* packed) {
  const int64_t bytes = unit_of(shape).bytes;
  std::memset(packed, 0, static_cast<size_t>(int4_rows_layout__bytes(shape)));
  for (int64_t row = 0; row < ceil_div(shape.out, kInt4Rows) * kInt4Rows; row++)
    pack_unit_row(shape, from, row, row % kInt4Rows, static_cast<uint8_t*>(packed) + row / kInt4Rows * bytes);
}

void int4_rows_layout__unpack(const WeightShape& shape, const void* packed, const CanonicalOutput& to) {
  const int64_t bytes = unit_of(shape).bytes;
  for (int64_t row = 0; row < shape.out; row++)
    unpack_unit_row(shape, static_cast<const uint8_t*>(packed) + row / kInt4Rows * bytes, row, row % kInt4Rows, to);
}

}  // namespace twofour
