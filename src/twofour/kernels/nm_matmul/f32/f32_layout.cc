// Packing to and from the kernels' layouts: portable, no instruction set assumed, nothing outside the buffers touched.
#include "f32_layout.h"

#include <bit>
#include <cstring>

#include "kernels/nm_matmul/canonical.h"
#include "kernels/nm_matmul/layout.h"
#include "kernels/nm_matmul/refill.h"

namespace twofour {
namespace {

static_assert(std::endian::native == std::endian::little, "metadata words are built from canonical bytes in order");

int64_t panel_meta_bytes(int64_t rows) { return ceil_div(rows * 8, 64) * 64; }
int64_t panel_tile_bytes(int64_t rows) { return panel_meta_bytes(rows) + rows * kPanelTile / 2 * 4; }

// Calls visit(meta, values, row, k) for every row and tile of the panels layout.
template <class Byte, class Visit>
void for_each_panel_row(Byte* packed, int64_t out, int64_t in, const Visit& visit) {
  const int64_t tiles = ceil_div(in, kPanelTile);
  for (int64_t first = 0; first < out; first += kPanelRows) {
    const int64_t rows = least(kPanelRows, out - first);
    for (int64_t t = 0; t < tiles; t++, packed += panel_tile_bytes(rows)) {
      Byte* values = packed + panel_meta_bytes(rows);
      for (int64_t r = 0; r < rows; r++) visit(packed + r * 8, values + r * kPanelTile * 2, first + r, t * kPanelTile);
    }
  }
}

void pack_panels(const float* values, const uint8_t* indices, int64_t out, int64_t in, uint8_t* packed) {
  const Canonical canonical{in};
  std::memset(packed, 0, static_cast<size_t>(panels_layout__bytes({out, in, 0, false})));
  for_each_panel_row(packed, out, in, [&](uint8_t* meta, uint8_t* kept, int64_t row, int64_t k) {
    canonical.read(indices + row * canonical.bytes_per_row(), k, kPanelTile, meta);
    const size_t count = static_cast<size_t>(least(kPanelTile, in - k) / 2);
    std::memcpy(kept, values + row * canonical.values_per_row() + k / 2, count * 4);
  });
}

void unpack_panels(const uint8_t* packed, int64_t out, int64_t in, float* values, uint8_t* indices) {
  const Canonical canonical{in};
  for_each_panel_row(packed, out, in, [&](const uint8_t* meta, const uint8_t* kept, int64_t row, int64_t k) {
    canonical.write(indices + row * canonical.bytes_per_row(), k, kPanelTile, meta);
    const size_t count = static_cast<size_t>(least(kPanelTile, in - k) / 2);
    std::memcpy(values + row * canonical.values_per_row() + k / 2, kept, count * 4);
  });
}

// Rows at once: a rectangle of 96 x 64 floats fits L1 beside what is written.
constexpr int64_t kRefillAtOnce = kPairRows;
static_assert(kPanelRows % kRefillAtOnce == 0 && kRefillRows % kPanelRows == 0);

// Inputs inside, so that what a core fetches ahead along the weight's rows is still in L2 when its turn comes.
void refill_panels(const DenseSource& from, int64_t out, int64_t in, int64_t begin, int64_t end, uint8_t* packed) {
  Rectangle<float, kRefillAtOnce> dense;
  for (int64_t first = begin; first < end; first += kRefillAtOnce) {
    const int64_t block = first / kPanelRows * kPanelRows, rows = least(kPanelRows, out - block);
    const int64_t tile_bytes = panel_tile_bytes(rows), count = least(kRefillAtOnce, out - first);
    uint8_t* tile = packed + block * ceil_div(in, kPanelTile) * (8 + kPanelTile / 2 * 4);
    for (int64_t k = 0; k < in; k += kPanelTile, tile += tile_bytes) {
      dense.load(from, first, count, k, least(kPanelTile, in - k));
      const uint8_t* metas = tile + (first - block) * 8;
      uint8_t* values = tile + panel_meta_bytes(rows) + (first - block) * kPanelTile * 2;
      for (int64_t r = 0; r < count; r++) {
        uint64_t meta;
        std::memcpy(&meta, metas + r * 8, 8);
        dense.pick(r, meta, values + r * kPanelTile * 2);
      }
    }
  }
}

// Calls visit(half unit, first row, k) for every half unit (16 rows x 32 inputs) of the rows layout, in memory order.
template <class Byte, class Visit>
void for_each_half_unit(Byte* packed, int64_t out, int64_t in, const Visit& visit) {
  for (int64_t row = 0; row < out; row += 2 * kRowUnit)
    for (int64_t k = 0; k < in; k += kRowTile)
      for (int64_t half = 0; half < 2; half++, packed += kRowUnitBytes) visit(packed, row + half * kRowUnit, k);
}

void pack_rows(const float* values, const uint8_t* indices, int64_t out, int64_t in, uint8_t* packed) {
  const Canonical canonical{in};
  for_each_half_unit(packed, out, in, [&](uint8_t* unit, int64_t first, int64_t k) {
    std::memset(unit, kPaddingByte, kRowUnit * 4);
    std::memset(unit + kRowUnit * 4, 0, static_cast<size_t>(kRowUnitBytes - kRowUnit * 4));
    const int64_t count = least(kRowTile, in - k) / 2;
    for (int64_t r = 0; r < least(kRowUnit, out - first); r++) {
      const int64_t row = first + r;
      canonical.read(indices + row * canonical.bytes_per_row(), k, kRowTile, unit + r * 4);
      const float* from = values + row * canonical.values_per_row() + k / 2;
      for (int64_t i = 0; i < count; i++) std::memcpy(unit + ((i + 1) * kRowUnit + r) * 4, from + i, 4);
    }
  });
}

void unpack_rows(const uint8_t* packed, int64_t out, int64_t in, float* values, uint8_t* indices) {
  const Canonical canonical{in};
  for_each_half_unit(packed, out, in, [&](const uint8_t* unit, int64_t first, int64_t k) {
    const int64_t count = least(kRowTile, in - k) / 2;
    for (int64_t r = 0; r < least(kRowUnit, out - first); r++) {
      const int64_t row = first + r;
      canonical.write(indices + row * canonical.bytes_per_row(), k, kRowTile, unit + r * 4);
      float* to = values + row * canonical.values_per_row() + k / 2;
      for (int64_t i = 0; i < count; i++) std::memcpy(to + i, unit + ((i + 1) * kRowUnit + r) * 4, 4);
    }
  });
}

// One domain and tile of the pairs layout, unpacked: what a pair's record is built from and read back into.
struct PairTile {
  struct Row {
    uint64_t mask = 0;               // bit k: input k is kept
    float values[kPanelTile / 2]{};  // in order of the inputs
  };
  Row rows[kPairRows];
  int64_t count = 0;  // rows that exist; an odd last one is paired with a row of zero values

  struct Pair {
    int a, b, common;
  };
  Pair pairs[kPairRows / 2];
  int64_t pair_count = 0;

  void match();
};

// Greedy: of all pairs of free rows, the one with the most inputs in common, again and again. A counting sort makes it
// quadratic in the rows of a domain. The pairs come out ordered by what they share, so the kernel's loop counts change
// rarely and are predicted.
void PairTile::match() {
  constexpr int most = kPanelTile / 2;
  uint8_t first[kPairRows * kPairRows / 2], second[kPairRows * kPairRows / 2];
  int start[most + 2] = {};
  const int n = static_cast<int>(count);
  const auto common = [&](int a, int b) { return std::popcount(rows[a].mask & rows[b].mask); };
  for (int a = 0; a < n; a++)
    for (int b = a + 1; b < n; b++) start[most - common(a, b) + 1]++;
  for (int level = 0; level < most; level++) start[level + 1] += start[level];
  for (int a = 0; a < n; a++)
    for (int b = a + 1; b < n; b++) {
      const int at = start[most - common(a, b)]++;
      first[at] = static_cast<uint8_t>(a);
      second[at] = static_cast<uint8_t>(b);
    }
  bool taken[kPairRows] = {};
  pair_count = 0;
  for (int i = 0; i < n * (n - 1) / 2; i++) {
    const int a = first[i], b = second[i];
    if (taken[a] || taken[b]) continue;
    taken[a] = taken[b] = true;
    pairs[pair_count++] = {a, b, common(a, b)};
  }
}

// The inputs of `a` and `b` in the record's order: the shared ones, then one of each in turn.
void pair_inputs(uint64_t a, uint64_t b, int shared, uint8_t* inputs) {
  uint64_t both = a & b;
  for (int i = 0; i < shared; i++, both &= both - 1) {
    const uint64_t bit = both & (~both + 1);
    *inputs++ = static_cast<uint8_t>(std::countr_zero(bit));
    a &= ~bit;
    b &= ~bit;
  }
  for (; a != 0; a &= a - 1, b &= b - 1) {
    *inputs++ = static_cast<uint8_t>(std::countr_zero(a));
    *inputs++ = static_cast<uint8_t>(std::countr_zero(b) & 63);  // in bounds even for a code nobody validated
  }
}

// Which input the i-th value of a row (0 or 1 of the pair) belongs to.
uint8_t input_of(const uint8_t* inputs, int shared, int i, int which) {
  return i < shared ? inputs[i] : inputs[shared + 2 * (i - shared) + which];
}

void write_pairs(PairTile* tile, uint8_t* packed) {
  tile->match();
  std::memset(packed, 0, kPairTileBytes);
  for (int64_t p = 0; p < tile->pair_count; p++) {
    const PairTile::Pair pair = tile->pairs[p];
    const int shared = pair.common & ~1;  // the kernel takes two inputs per turn
    packed[p * 4] = static_cast<uint8_t>(pair.a);
    packed[p * 4 + 1] = static_cast<uint8_t>(pair.b);
    packed[p * 4 + 2] = static_cast<uint8_t>(shared);
    uint8_t* record = packed + kPairHead + p * kPairRecord;
    uint8_t* inputs = record + kPanelTile * 4;
    pair_inputs(tile->rows[pair.a].mask, tile->rows[pair.b].mask, shared, inputs);
    for (int which = 0; which < 2; which++) {
      const PairTile::Row& row = tile->rows[which == 0 ? pair.a : pair.b];
      for (int i = 0; i < kPanelTile / 2; i++) {
        const uint64_t below = (uint64_t{1} << input_of(inputs, shared, i, which)) - 1;
        std::memcpy(record + (2 * i + which) * 4, row.values + std::popcount(row.mask & below), 4);
      }
    }
  }
}

void pack_pairs(const float* values, const uint8_t* indices, int64_t out, int64_t in, uint8_t* packed) {
  const Canonical canonical{in};
  for (int64_t first = 0; first < out; first += kPairRows) {
    const int64_t rows = least(kPairRows, out - first);
    for (int64_t k = 0; k < in; k += kPanelTile, packed += kPairTileBytes) {
      PairTile tile;
      tile.count = rows + rows % 2;
      for (int64_t r = 0; r < tile.count; r++) {
        const int64_t row = first + least(r, rows - 1);  // the row of zeros keeps what its neighbour keeps
        uint8_t meta[kPanelTile / 8];
        canonical.read(indices + row * canonical.bytes_per_row(), k, kPanelTile, meta);
        for (int g = 0; g < kPanelTile / 4; g++) {
          const int nibble = meta[g / 2] >> (g % 2 * 4);
          tile.rows[r].mask |= uint64_t{1} << (4 * g + (nibble & 3)) | uint64_t{1} << (4 * g + (nibble >> 2 & 3));
        }
        const size_t count = static_cast<size_t>(least(kPanelTile, in - k) / 2);
        if (r < rows) std::memcpy(tile.rows[r].values, values + row * canonical.values_per_row() + k / 2, count * 4);
      }
      write_pairs(&tile, packed);
    }
  }
}

void refill_pairs(const DenseSource& from, int64_t out, int64_t in, int64_t begin, int64_t end, uint8_t* packed) {
  static_assert(kRefillRows % kPairRows == 0);
  Rectangle<float, kPairRows> dense;
  uint8_t* tile = packed + begin / kPairRows * ceil_div(in, kPanelTile) * kPairTileBytes;
  for (int64_t first = begin; first < end; first += kPairRows) {
    const int64_t rows = least(kPairRows, out - first);
    for (int64_t k = 0; k < in; k += kPanelTile, tile += kPairTileBytes) {
      dense.load(from, first, rows, k, least(kPanelTile, in - k));
      for (int64_t p = 0; p < (rows + 1) / 2; p++) {
        uint8_t* record = tile + kPairHead + p * kPairRecord;
        const uint8_t* inputs = record + kPanelTile * 4;
        const int shared = tile[p * 4 + 2] & 62;
        for (int which = 0; which < 2; which++) {
          if (tile[p * 4 + which] >= rows) continue;  // the row of zeros
          const float* row = dense.at + tile[p * 4 + which] * dense.row_step;
          for (int i = 0; i < kPanelTile / 2; i++) {
            const int input = input_of(inputs, shared, i, which) & 63;
            std::memcpy(record + (2 * i + which) * 4, row + input * dense.column_step, 4);
          }
        }
      }
    }
  }
}

// One row of a pair back to its canonical place.
void unpack_pair_row(const Canonical& canonical, const uint8_t* record, int shared, int which, int64_t k, float* values,
                     uint8_t* indices) {
  const uint8_t* inputs = record + kPanelTile * 4;
  uint64_t mask = 0;
  for (int i = 0; i < kPanelTile / 2; i++) mask |= uint64_t{1} << (input_of(inputs, shared, i, which) & 63);
  for (int i = 0; i < kPanelTile / 2; i++) {
    const int input = input_of(inputs, shared, i, which) & 63;
    const int at = std::popcount(mask & ((uint64_t{1} << input) - 1));
    if (k / 2 + at < canonical.values_per_row()) std::memcpy(values + k / 2 + at, record + (2 * i + which) * 4, 4);
  }
  uint8_t meta[kPanelTile / 8] = {};
  for (int g = 0; g < kPanelTile / 4; g++) {
    const unsigned kept = static_cast<unsigned>(mask >> (4 * g)) & 15;
    const unsigned low = static_cast<unsigned>(std::countr_zero(kept | 16u)) & 3;
    const unsigned high = static_cast<unsigned>(std::bit_width(kept | 1u) - 1);
    meta[g / 2] = static_cast<uint8_t>(meta[g / 2] | (low | high << 2) << (g % 2 * 4));
  }
  canonical.write(indices, k, kPanelTile, meta);
}

void unpack_pairs(const uint8_t* packed, int64_t out, int64_t in, float* values, uint8_t* indices) {
  const Canonical canonical{in};
  for (int64_t first = 0; first < out; first += kPairRows) {
    const int64_t rows = least(kPairRows, out - first);
    for (int64_t k = 0; k < in; k += kPanelTile, packed += kPairTileBytes)
      for (int64_t p = 0; p < (rows + 1) / 2; p++)
        for (int which = 0; which < 2; which++) {
          const int64_t r = packed[p * 4 + which];
          if (r >= rows) continue;
          unpack_pair_row(canonical, packed + kPairHead + p * kPairRecord, packed[p * 4 + 2] & 62, which, k,
                          values + (first + r) * canonical.values_per_row(),
                          indices + (first + r) * canonical.bytes_per_row());
        }
  }
}

}  // namespace

int64_t panels_layout__bytes(const WeightShape& shape) {
  const int64_t full = shape.out / kPanelRows, rest = shape.out % kPanelRows;
  return ceil_div(shape.in, kPanelTile) * (full * panel_tile_bytes(kPanelRows) + panel_tile_bytes(rest));
}
int64_t pairs_layout__bytes(const WeightShape& shape) {
  return ceil_div(shape.out, kPairRows) * ceil_div(shape.in, kPanelTile) * kPairTileBytes;
}
int64_t rows_layout__bytes(const WeightShape& shape) {
  return ceil_div(shape.out, 2 * kRowUnit) * 2 * ceil_div(shape.in, kRowTile) * kRowUnitBytes;
}

#define TWOFOUR_F32_LAYOUT(name)                                                                                    \
  void name##_layout__pack(const WeightShape& shape, const CanonicalWeight& from, void* packed) {                   \
    pack_##name(static_cast<const float*>(from.values), from.indices, shape.out, shape.in,                          \
                static_cast<uint8_t*>(packed));                                                                     \
  }                                                                                                                 \
  void name##_layout__unpack(const WeightShape& shape, const void* packed, const CanonicalOutput& to) {             \
    unpack_##name(static_cast<const uint8_t*>(packed), shape.out, shape.in, static_cast<float*>(to.values),         \
                  to.indices);                                                                                      \
  }
TWOFOUR_F32_LAYOUT(panels)
TWOFOUR_F32_LAYOUT(pairs)
TWOFOUR_F32_LAYOUT(rows)
#undef TWOFOUR_F32_LAYOUT

#define TWOFOUR_F32_REFILL(name)                                                                            \
  void name##_layout__refill(const WeightShape& shape, const DenseSource& from, int64_t begin, int64_t end, \
                             void* packed) {                                                                \
    refill_##name(from, shape.out, shape.in, begin, end, static_cast<uint8_t*>(packed));                    \
  }
TWOFOUR_F32_REFILL(panels)
TWOFOUR_F32_REFILL(pairs)
#undef TWOFOUR_F32_REFILL

}  // namespace twofour
