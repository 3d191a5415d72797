// Packing to and from the layouts "rows" and "bf16_rows": portable, nothing outside the buffers touched.
#include "rows.h"

#include <cstring>

#include "canonical.h"
#include "layout.h"

namespace twofour {

int64_t rows_layout__bytes(const WeightShape& shape) {
  return ceil_div(shape.out, 2 * kRowUnit) * 2 * ceil_div(shape.in, kRowTile) * kRowHalfBytes;
}

void rows_layout__pack(const WeightShape& shape, const CanonicalWeight& from, void* packed) {
  const Canonical canonical{shape.in};
  const auto visit = [&](uint8_t* unit, int64_t first, int64_t k) {
    std::memset(unit, kPaddingByte, kRowUnit * 4);
    std::memset(unit + kRowUnit * 4, 0, static_cast<size_t>(kRowHalfBytes - kRowUnit * 4));
    const int64_t count = least(kRowTile, shape.in - k) / 2;
    for (int64_t r = 0; r < least(kRowUnit, shape.out - first); r++) {
      const int64_t row = first + r;
      canonical.read(from.indices + row * canonical.bytes_per_row(), k, kRowTile, unit + r * 4);
      const float* values = static_cast<const float*>(from.values) + row * canonical.values_per_row() + k / 2;
      for (int64_t i = 0; i < count; i++) std::memcpy(unit + ((i + 1) * kRowUnit + r) * 4, values + i, 4);
    }
  };
  for_each_half_unit<kRowHalfBytes>(static_cast<uint8_t*>(packed), shape, visit);
}

void rows_layout__unpack(const WeightShape& shape, const void* packed, const CanonicalOutput& to) {
  const Canonical canonical{shape.in};
  const auto visit = [&](const uint8_t* unit, int64_t first, int64_t k) {
    const int64_t count = least(kRowTile, shape.in - k) / 2;
    for (int64_t r = 0; r < least(kRowUnit, shape.out - first); r++) {
      const int64_t row = first + r;
      canonical.write(to.indices + row * canonical.bytes_per_row(), k, kRowTile, unit + r * 4);
      float* values = static_cast<float*>(to.values) + row * canonical.values_per_row() + k / 2;
      for (int64_t i = 0; i < count; i++) std::memcpy(values + i, unit + ((i + 1) * kRowUnit + r) * 4, 4);
    }
  };
  for_each_half_unit<kRowHalfBytes>(static_cast<const uint8_t*>(packed), shape, visit);
}

int64_t bf16_rows_layout__bytes(const WeightShape& shape) {
  return ceil_div(shape.out, 2 * kRowUnit) * 2 * ceil_div(shape.in, kRowTile) * kBf16HalfBytes;
}

void bf16_rows_layout__pack(const WeightShape& shape, const CanonicalWeight& from, void* packed) {
  const Canonical canonical{shape.in};
  const auto visit = [&](uint8_t* unit, int64_t first, int64_t k) {
    std::memset(unit, 0, static_cast<size_t>(kBf16HalfBytes));
    const int64_t groups = least(kRowTile, shape.in - k) / 4;
    for (int64_t r = 0; r < least(kRowUnit, shape.out - first); r++) {
      const int64_t row = first + r;
      uint8_t meta[kRowTile / 8];
      canonical.read(from.indices + row * canonical.bytes_per_row(), k, kRowTile, meta);
      const auto* values = static_cast<const uint16_t*>(from.values) + row * canonical.values_per_row() + k / 2;
      uint32_t word = 0;
      for (int64_t g = 0; g < kRowTile / 4; g++) {
        const unsigned nibble = nibble_of(meta, g);
        word |= (nibble & 3) << (2 * g) | nibble >> 2 << (16 + 2 * g);
        if (g < groups) std::memcpy(unit + ((g + 1) * kRowUnit + r) * 4, values + 2 * g, 4);
      }
      std::memcpy(unit + r * 4, &word, 4);
    }
  };
  for_each_half_unit<kBf16HalfBytes>(static_cast<uint8_t*>(packed), shape, visit);
}

void bf16_rows_layout__unpack(const WeightShape& shape, const void* packed, const CanonicalOutput& to) {
  const Canonical canonical{shape.in};
  const auto visit = [&](const uint8_t* unit, int64_t first, int64_t k) {
    const int64_t groups = least(kRowTile, shape.in - k) / 4;
    for (int64_t r = 0; r < least(kRowUnit, shape.out - first); r++) {
      const int64_t row = first + r;
      auto* values = static_cast<uint16_t*>(to.values) + row * canonical.values_per_row() + k / 2;
      uint32_t word;
      std::memcpy(&word, unit + r * 4, 4);
      uint8_t meta[kRowTile / 8] = {};
      for (int64_t g = 0; g < kRowTile / 4; g++) {
        const unsigned nibble = (word >> (2 * g) & 3) | (word >> (16 + 2 * g) & 3) << 2;
        meta[g / 2] = static_cast<uint8_t>(meta[g / 2] | nibble << (g % 2 * 4));
        if (g < groups) std::memcpy(values + 2 * g, unit + ((g + 1) * kRowUnit + r) * 4, 4);
      }
      canonical.write(to.indices + row * canonical.bytes_per_row(), k, kRowTile, meta);
    }
  };
  for_each_half_unit<kBf16HalfBytes>(static_cast<const uint8_t*>(packed), shape, visit);
}

}  // namespace twofour
