// Packing to the layout "int4_dense": portable, nothing outside the buffers touched.
#include <cstring>

#include "int4.h"

namespace twofour {
namespace {

Int4Unit unit_of(int64_t in, int64_t group, bool zeros) { return {in, group, zeros, kInt4DenseBlockBytes}; }

struct DenseRow {
  const uint8_t* values;
  const float* scales;
  const float* zeros;
};

// One row of a unit; a null row is one of zeros.
void pack_row(const Int4Unit& at, const DenseRow& row, int64_t in, int64_t in_unit, bool zeros, uint8_t* unit) {
  for (int64_t t = 0; t < at.tiles; t++) {
    const int64_t group = t / at.group_tiles;
    const uint16_t stored = to_stored_scale(row.scales == nullptr ? 1.0f : row.scales[group]);
    const int zero = kInt4Offset + (row.zeros == nullptr ? 0 : static_cast<int>(row.zeros[group]));
    std::memcpy(unit + at.scales + (group * kInt4Rows + in_unit) * 2, &stored, 2);
    if (zeros) unit[at.zeros + group * kInt4Rows + in_unit] = static_cast<uint8_t>(zero);
    uint8_t* half = unit + at.blocks + t * kInt4DenseBlockBytes + in_unit / kInt4Half * kInt4DenseHalfBytes;
    for (int64_t i = 0; i < kInt4Tile; i++) {
      const int64_t k = t * kInt4Tile + i;
      const int value = row.values != nullptr && k < in ? half_byte(row.values, k) ^ kInt4Offset : zero;
      Int4Place(in_unit % kInt4Half, i).write(half, value);
    }
  }
}

}  // namespace

int64_t int4_dense_layout__bytes(int64_t out, int64_t in, int64_t group, bool zeros) {
  return (out + kInt4Rows - 1) / kInt4Rows * unit_of(in, group, zeros).bytes;
}

void int4_dense_layout__pack(const uint8_t* values, const float* scales, const float* zeros, int64_t out, int64_t in,
                             int64_t group, void* packed) {
  const Int4Unit at = unit_of(in, group, zeros != nullptr);
  auto* unit = static_cast<uint8_t*>(packed);
  std::memset(unit, 0, static_cast<size_t>(int4_dense_layout__bytes(out, in, group, zeros != nullptr)));
  for (int64_t first = 0; first < out; first += kInt4Rows, unit += at.bytes)
    for (int64_t r = 0; r < kInt4Rows; r++) {
      const int64_t row = first + r;
      DenseRow from{nullptr, nullptr, nullptr};
      if (row < out)
        from = {values + row * ((in + 1) / 2), scales + row * at.groups,
                zeros == nullptr ? nullptr : zeros + row * at.groups};
      pack_row(at, from, in, r, zeros != nullptr, unit);
    }
}

}  // namespace twofour
