// Packing to and from the layout "pairs": portable, no instruction set assumed, nothing outside the buffers touched.
#include "pairs.h"

#include <bit>
#include <cstring>

#include "canonical.h"
#include "layout.h"
#include "refill.h"

namespace twofour {
namespace {

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

template <class Source>
void refill_from(const WeightShape& shape, const ValueSource& from, int64_t begin, int64_t end, void* packed) {
  static_assert(kRefillRows % kPairRows == 0);
  Source source;
  uint8_t* tile = static_cast<uint8_t*>(packed) + begin / kPairRows * ceil_div(shape.in, kPanelTile) * kPairTileBytes;
  for (int64_t first = begin; first < end; first += kPairRows) {
    const int64_t rows = least(kPairRows, shape.out - first);
    for (int64_t k = 0; k < shape.in; k += kPanelTile, tile += kPairTileBytes) {
      source.load(from, first, rows, k, least(kPanelTile, shape.in - k));
      for (int64_t p = 0; p < (rows + 1) / 2; p++) {
        uint8_t* record = tile + kPairHead + p * kPairRecord;
        const uint8_t* inputs = record + kPanelTile * 4;
        const int shared = tile[p * 4 + 2] & 62;
        for (int which = 0; which < 2; which++) {
          if (tile[p * 4 + which] >= rows) continue;  // the row of zeros
          for (int i = 0; i < kPanelTile / 2; i++) {
            const int input = input_of(inputs, shared, i, which) & 63;
            std::memcpy(record + (2 * i + which) * 4, &source.value(tile[p * 4 + which], input), 4);
          }
        }
      }
    }
  }
}

}  // namespace

int64_t pairs_layout__bytes(const WeightShape& shape) {
  return ceil_div(shape.out, kPairRows) * ceil_div(shape.in, kPanelTile) * kPairTileBytes;
}

void pairs_layout__pack(const WeightShape& shape, const CanonicalWeight& from, void* packed) {
  const Canonical canonical{shape.in};
  auto* tile_at = static_cast<uint8_t*>(packed);
  for (int64_t first = 0; first < shape.out; first += kPairRows) {
    const int64_t rows = least(kPairRows, shape.out - first);
    for (int64_t k = 0; k < shape.in; k += kPanelTile, tile_at += kPairTileBytes) {
      PairTile tile;
      tile.count = rows + rows % 2;
      for (int64_t r = 0; r < tile.count; r++) {
        const int64_t row = first + least(r, rows - 1);  // the row of zeros keeps what its neighbour keeps
        uint8_t meta[kPanelTile / 8];
        canonical.read(from.indices + row * canonical.bytes_per_row(), k, kPanelTile, meta);
        for (int g = 0; g < kPanelTile / 4; g++) {
          const int nibble = meta[g / 2] >> (g % 2 * 4);
          tile.rows[r].mask |= uint64_t{1} << (4 * g + (nibble & 3)) | uint64_t{1} << (4 * g + (nibble >> 2 & 3));
        }
        const size_t count = static_cast<size_t>(least(kPanelTile, shape.in - k) / 2);
        const auto* values = static_cast<const float*>(from.values) + row * canonical.values_per_row() + k / 2;
        if (r < rows) std::memcpy(tile.rows[r].values, values, count * 4);
      }
      write_pairs(&tile, tile_at);
    }
  }
}

void pairs_layout__refill(const WeightShape& shape, const ValueSource& from, int64_t begin, int64_t end, void* packed) {
  if (from.indices != nullptr) refill_from<KeptRectangle<float, kPairRows, true>>(shape, from, begin, end, packed);
  else refill_from<Rectangle<float, kPairRows>>(shape, from, begin, end, packed);
}

void pairs_layout__unpack(const WeightShape& shape, const void* packed, const CanonicalOutput& to) {
  const Canonical canonical{shape.in};
  const auto* tile = static_cast<const uint8_t*>(packed);
  for (int64_t first = 0; first < shape.out; first += kPairRows) {
    const int64_t rows = least(kPairRows, shape.out - first);
    for (int64_t k = 0; k < shape.in; k += kPanelTile, tile += kPairTileBytes)
      for (int64_t p = 0; p < (rows + 1) / 2; p++)
        for (int which = 0; which < 2; which++) {
          const int64_t r = tile[p * 4 + which];
          if (r >= rows) continue;
          unpack_pair_row(canonical, tile + kPairHead + p * kPairRecord, tile[p * 4 + 2] & 62, which, k,
                          static_cast<float*>(to.values) + (first + r) * canonical.values_per_row(),
                          to.indices + (first + r) * canonical.bytes_per_row());
        }
  }
}

}  // namespace twofour
