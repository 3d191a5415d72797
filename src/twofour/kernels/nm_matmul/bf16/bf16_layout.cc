// Packing to and from the bfloat16 layouts: portable, no instruction set assumed, nothing outside the buffers touched.
#include "bf16_layout.h"

#include <bit>
#include <cstring>

#include "kernels/nm_matmul/canonical.h"
#include "kernels/nm_matmul/layout.h"
#include "kernels/nm_matmul/refill.h"

namespace twofour {
namespace {

static_assert(std::endian::native == std::endian::little, "metadata words are built from canonical bytes in order");

int64_t panel_meta_bytes(int64_t rows) { return ceil_div(rows * 8, 64) * 64; }
int64_t panel_tile_bytes(int64_t rows) { return panel_meta_bytes(rows) + rows * kBf16PanelTile; }

// Calls visit(meta, values, row, k) for every row and tile of the panels layout.
template <class Byte, class Visit>
void for_each_panel_row(Byte* packed, const WeightShape& shape, const Visit& visit) {
  const int64_t tiles = ceil_div(shape.in, kBf16PanelTile);
  for (int64_t first = 0; first < shape.out; first += kBf16PanelRows) {
    const int64_t rows = least(kBf16PanelRows, shape.out - first);
    for (int64_t t = 0; t < tiles; t++, packed += panel_tile_bytes(rows)) {
      Byte* values = packed + panel_meta_bytes(rows);
      for (int64_t r = 0; r < rows; r++)
        visit(packed + r * 8, values + r * kBf16PanelTile, first + r, t * kBf16PanelTile);
    }
  }
}

// Calls visit(half unit, first row, k) for every half unit (16 rows x 32 inputs) of the rows layout, in memory order.
template <class Byte, class Visit>
void for_each_half_unit(Byte* packed, const WeightShape& shape, const Visit& visit) {
  for (int64_t row = 0; row < shape.out; row += 2 * kBf16RowUnit)
    for (int64_t k = 0; k < shape.in; k += kBf16RowTile)
      for (int64_t half = 0; half < 2; half++, packed += kBf16HalfUnitBytes)
        visit(packed, row + half * kBf16RowUnit, k);
}

unsigned nibble_of(const uint8_t* meta, int64_t group) { return meta[group / 2] >> (group % 2 * 4) & 15u; }
unsigned swapped(unsigned nibble) { return (nibble & 3) << 2 | nibble >> 2; }

// Metadata and values of `groups` groups between canonical and panel order: the map is its own inverse.
void turn_pairs(const uint8_t* meta, const uint16_t* values, int64_t groups, uint8_t* to_meta, uint16_t* to_values) {
  for (int64_t g = 0; g < groups; g++) {
    const unsigned nibble = nibble_of(meta, g);
    const bool keep = nibble == kBf16AscendingCode;
    const unsigned code = keep ? nibble : swapped(nibble);
    to_meta[g / 2] = static_cast<uint8_t>(g % 2 == 0 ? code : to_meta[g / 2] | code << 4);
    to_values[2 * g] = values[2 * g + !keep];
    to_values[2 * g + 1] = values[2 * g + keep];
  }
}

}  // namespace

int64_t bf16_panels_layout__bytes(const WeightShape& shape) {
  const int64_t full = shape.out / kBf16PanelRows, rest = shape.out % kBf16PanelRows;
  return ceil_div(shape.in, kBf16PanelTile) * (full * panel_tile_bytes(kBf16PanelRows) + panel_tile_bytes(rest));
}

void bf16_panels_layout__pack(const WeightShape& shape, const CanonicalWeight& from, void* packed) {
  const Canonical canonical{shape.in};
  std::memset(packed, 0, static_cast<size_t>(bf16_panels_layout__bytes(shape)));
  for_each_panel_row(static_cast<uint8_t*>(packed), shape, [&](uint8_t* meta, uint8_t* kept, int64_t row, int64_t k) {
    constexpr int64_t groups = kBf16PanelTile / 4;
    uint8_t ascending[groups / 2];
    uint16_t values[2 * groups] = {}, turned[2 * groups];
    canonical.read(from.indices + row * canonical.bytes_per_row(), k, kBf16PanelTile, ascending);
    std::memcpy(values, static_cast<const uint16_t*>(from.values) + row * canonical.values_per_row() + k / 2,
                static_cast<size_t>(least(kBf16PanelTile, shape.in - k)));
    turn_pairs(ascending, values, groups, meta, turned);
    std::memcpy(kept, turned, sizeof turned);
  });
}

void bf16_panels_layout__unpack(const WeightShape& shape, const void* packed, const CanonicalOutput& to) {
  const Canonical canonical{shape.in};
  const auto visit = [&](const uint8_t* meta, const uint8_t* kept, int64_t row, int64_t k) {
    constexpr int64_t groups = kBf16PanelTile / 4;
    uint8_t ascending[groups / 2];
    uint16_t values[2 * groups], turned[2 * groups];
    std::memcpy(turned, kept, sizeof turned);
    turn_pairs(meta, turned, groups, ascending, values);
    canonical.write(to.indices + row * canonical.bytes_per_row(), k, kBf16PanelTile, ascending);
    std::memcpy(static_cast<uint16_t*>(to.values) + row * canonical.values_per_row() + k / 2, values,
                static_cast<size_t>(least(kBf16PanelTile, shape.in - k)));
  };
  for_each_panel_row(static_cast<const uint8_t*>(packed), shape, visit);
}

// Inputs inside, as in float32.
void bf16_panels_layout__refill(const WeightShape& shape, const DenseSource& from, int64_t begin, int64_t end,
                                void* packed) {
  constexpr int64_t at_once = 96, tile_inputs = kBf16PanelTile;
  static_assert(kRefillRows == kBf16PanelRows && kBf16PanelRows % at_once == 0);
  Rectangle<uint16_t, at_once> dense;
  for (int64_t first = begin; first < end; first += at_once) {
    const int64_t block = first / kBf16PanelRows * kBf16PanelRows, rows = least(kBf16PanelRows, shape.out - block);
    const int64_t count = least(at_once, shape.out - first);
    auto* tile = static_cast<uint8_t*>(packed) + block * ceil_div(shape.in, tile_inputs) * (8 + tile_inputs);
    for (int64_t k = 0; k < shape.in; k += tile_inputs, tile += panel_tile_bytes(rows)) {
      dense.load(from, first, count, k, least(tile_inputs, shape.in - k));
      const uint8_t* metas = tile + (first - block) * 8;
      uint8_t* values = tile + panel_meta_bytes(rows) + (first - block) * tile_inputs;
      for (int64_t r = 0; r < count; r++) {
        uint64_t meta;
        std::memcpy(&meta, metas + r * 8, 8);
        dense.pick(r, meta, values + r * tile_inputs);
      }
    }
  }
}

int64_t bf16_rows_layout__bytes(const WeightShape& shape) {
  return ceil_div(shape.out, 2 * kBf16RowUnit) * 2 * ceil_div(shape.in, kBf16RowTile) * kBf16HalfUnitBytes;
}

void bf16_rows_layout__pack(const WeightShape& shape, const CanonicalWeight& from, void* packed) {
  const Canonical canonical{shape.in};
  for_each_half_unit(static_cast<uint8_t*>(packed), shape, [&](uint8_t* unit, int64_t first, int64_t k) {
    std::memset(unit, 0, static_cast<size_t>(kBf16HalfUnitBytes));
    const int64_t groups = least(kBf16RowTile, shape.in - k) / 4;
    for (int64_t r = 0; r < least(kBf16RowUnit, shape.out - first); r++) {
      const int64_t row = first + r;
      uint8_t meta[kBf16RowTile / 8];
      canonical.read(from.indices + row * canonical.bytes_per_row(), k, kBf16RowTile, meta);
      const auto* values = static_cast<const uint16_t*>(from.values) + row * canonical.values_per_row() + k / 2;
      uint32_t word = 0;
      for (int64_t g = 0; g < kBf16RowTile / 4; g++) {
        const unsigned nibble = nibble_of(meta, g);
        word |= (nibble & 3) << (2 * g) | nibble >> 2 << (16 + 2 * g);
        if (g < groups) std::memcpy(unit + ((g + 1) * kBf16RowUnit + r) * 4, values + 2 * g, 4);
      }
      std::memcpy(unit + r * 4, &word, 4);
    }
  });
}

void bf16_rows_layout__unpack(const WeightShape& shape, const void* packed, const CanonicalOutput& to) {
  const Canonical canonical{shape.in};
  for_each_half_unit(static_cast<const uint8_t*>(packed), shape, [&](const uint8_t* unit, int64_t first, int64_t k) {
    const int64_t groups = least(kBf16RowTile, shape.in - k) / 4;
    for (int64_t r = 0; r < least(kBf16RowUnit, shape.out - first); r++) {
      const int64_t row = first + r;
      auto* values = static_cast<uint16_t*>(to.values) + row * canonical.values_per_row() + k / 2;
      uint32_t word;
      std::memcpy(&word, unit + r * 4, 4);
      uint8_t meta[kBf16RowTile / 8] = {};
      for (int64_t g = 0; g < kBf16RowTile / 4; g++) {
        const unsigned nibble = (word >> (2 * g) & 3) | (word >> (16 + 2 * g) & 3) << 2;
        meta[g / 2] = static_cast<uint8_t>(meta[g / 2] | nibble << (g % 2 * 4));
        if (g < groups) std::memcpy(values + 2 * g, unit + ((g + 1) * kBf16RowUnit + r) * 4, 4);
      }
      canonical.write(to.indices + row * canonical.bytes_per_row(), k, kBf16RowTile, meta);
    }
  });
}

}  // namespace twofour
