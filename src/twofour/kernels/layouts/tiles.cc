// Packing to and from the tile layouts: portable, no instruction set assumed.
#include "tiles.h"

#include <cstring>

#include "canonical.h"
#include "octets.h"
#include "layout.h"

namespace twofour {
namespace {

// A tile in its packed form: masks, then kept values. Group g of its inputs, row r of its 16.
struct Bf16Tile {
  using Value = uint16_t;
  static constexpr int64_t inputs = kBf16Inputs, bytes = kBf16Packed;

  // Inputs 0, 1 of every row of a group, then inputs 2, 3: a bit each.
  static int64_t bit(int64_t g, int64_t r, int input) { return g * 64 + input / 2 * 32 + r * 2 + input % 2; }
  // A pair per row; the first value stands in the half of its input, an even one low, the second in the other half.
  static int64_t place(int64_t g, int64_t r, int first, int which) {
    return (g * kTileRows + r) * 2 + ((first + which) & 1);
  }
  static constexpr int64_t values_at = kBf16Masks;
};

struct Int8Tile {
  using Value = int8_t;
  static constexpr int64_t inputs = kInt8Inputs, bytes = kInt8Packed;

  static int64_t bit(int64_t g, int64_t r, int input) { return (g * kTileRows + r) * 4 + input; }
  static int64_t place(int64_t g, int64_t r, int, int which) { return (g * kTileRows + r) * 2 + which; }
  static constexpr int64_t values_at = kInt8Masks;
};

// Calls visit(tile, row in the tile, row of the weight, first input) for every row of every tile that the weight has.
template <class Tile, class Byte, class Visit>
void for_each_row(Byte* packed, const WeightShape& shape, const Visit& visit) {
  for (int64_t strip = 0; strip < shape.out; strip += kStripRows)
    for (int64_t k = 0; k < shape.in; k += Tile::inputs)
      for (int64_t first = strip; first < strip + kStripRows; first += kTileRows, packed += Tile::bytes)
        for (int64_t r = 0; r < least(kTileRows, shape.out - first); r++) visit(packed, r, first + r, k);
}

template <class Tile>
int64_t tiles_bytes(const WeightShape& shape) {
  return ceil_div(shape.out, kStripRows) * ceil_div(shape.in, Tile::inputs) * 2 * Tile::bytes;
}

// Inputs and rows that the weight lacks keep mask bits of zero: nothing is expanded there.
template <class Tile>
void pack_tiles(const WeightShape& shape, const void* values, const uint8_t* indices, uint8_t* packed) {
  using Value = typename Tile::Value;
  const Canonical canonical{shape.in};
  std::memset(packed, 0, static_cast<size_t>(tiles_bytes<Tile>(shape)));
  for_each_row<Tile>(packed, shape, [&](uint8_t* tile, int64_t r, int64_t row, int64_t k) {
    uint8_t meta[Tile::inputs / 8];
    canonical.read(indices + row * canonical.bytes_per_row(), k, Tile::inputs, meta);
    const Value* from = static_cast<const Value*>(values) + row * canonical.values_per_row() + k / 2;
    for (int64_t g = 0; g < least(Tile::inputs, shape.in - k) / 4; g++) {
      const int nibble = meta[g / 2] >> (g % 2 * 4), inputs[] = {nibble & 3, nibble >> 2 & 3};
      for (int which = 0; which < 2; which++) {
        const int64_t bit = Tile::bit(g, r, inputs[which]);
        tile[bit / 8] = static_cast<uint8_t>(tile[bit / 8] | 1 << bit % 8);
        const int64_t at = Tile::place(g, r, inputs[0], which);
        std::memcpy(tile + Tile::values_at + at * sizeof(Value), from + g * 2 + which, sizeof(Value));
      }
    }
  });
}

template <class Tile>
void unpack_tiles(const WeightShape& shape, const uint8_t* packed, void* values, uint8_t* indices) {
  using Value = typename Tile::Value;
  const Canonical canonical{shape.in};
  for_each_row<Tile>(packed, shape, [&](const uint8_t* tile, int64_t r, int64_t row, int64_t k) {
    uint8_t meta[Tile::inputs / 8] = {};
    Value* to = static_cast<Value*>(values) + row * canonical.values_per_row() + k / 2;
    for (int64_t g = 0; g < least(Tile::inputs, shape.in - k) / 4; g++) {
      int inputs[2] = {}, found = 0;
      for (int input = 0; input < 4 && found < 2; input++) {
        const int64_t bit = Tile::bit(g, r, input);
        if ((tile[bit / 8] >> bit % 8 & 1) != 0) inputs[found++] = input;
      }
      meta[g / 2] = static_cast<uint8_t>(meta[g / 2] | (inputs[0] | inputs[1] << 2) << (g % 2 * 4));
      for (int which = 0; which < 2; which++) {
        const int64_t at = Tile::place(g, r, inputs[0], which);
        std::memcpy(to + g * 2 + which, tile + Tile::values_at + at * sizeof(Value), sizeof(Value));
      }
    }
    canonical.write(indices + row * canonical.bytes_per_row(), k, Tile::inputs, meta);
  });
}

}  // namespace

int64_t bf16_tiles_layout__bytes(const WeightShape& shape) { return tiles_bytes<Bf16Tile>(shape); }
void bf16_tiles_layout__pack(const WeightShape& shape, const CanonicalWeight& from, void* packed) {
  pack_tiles<Bf16Tile>(shape, from.values, from.indices, static_cast<uint8_t*>(packed));
}
void bf16_tiles_layout__unpack(const WeightShape& shape, const void* packed, const CanonicalOutput& to) {
  unpack_tiles<Bf16Tile>(shape, static_cast<const uint8_t*>(packed), to.values, to.indices);
}

int64_t int8_tiles_layout__bytes(const WeightShape& shape) {
  return int8_head_bytes(shape.out) + tiles_bytes<Int8Tile>(shape);
}
void int8_tiles_layout__pack(const WeightShape& shape, const CanonicalWeight& from, void* packed) {
  auto* to = static_cast<uint8_t*>(packed);
  std::memset(to, 0, static_cast<size_t>(int8_head_bytes(shape.out)));
  pack_int8_head(shape, from, to);
  pack_tiles<Int8Tile>(shape, from.values, from.indices, to + int8_head_bytes(shape.out));
}
void int8_tiles_layout__unpack(const WeightShape& shape, const void* packed, const CanonicalOutput& to) {
  const auto* from = static_cast<const uint8_t*>(packed);
  std::memcpy(to.scales, from, static_cast<size_t>(shape.out) * 4);
  unpack_tiles<Int8Tile>(shape, from + int8_head_bytes(shape.out), to.values, to.indices);
}

}  // namespace twofour
