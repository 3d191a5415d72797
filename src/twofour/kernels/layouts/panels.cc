// Packing to and from the panel layouts: portable, no instruction set assumed, nothing outside the buffers touched.
#include "panels.h"

#include <cstring>

#include "canonical.h"
#include "layout.h"
#include "refill.h"

namespace twofour {
namespace {

template <class Value, class Byte>
using Block = PanelBlock<sizeof(Value), Byte>;

// Calls visit(meta, values, row, k) for every row and tile, in memory order.
template <class Value, class Byte, class Visit>
void for_each_row(Byte* packed, const WeightShape& shape, const Visit& visit) {
  for (int64_t first = 0; first < shape.out; first += kPanelRows) {
    const Block<Value, Byte> block(packed, first, shape.out, shape.in);
    for (int64_t t = 0; t < ceil_div(shape.in, kPanelTile); t++)
      for (int64_t r = 0; r < block.rows; r++) visit(block.meta(t, r), block.values(t, r), first + r, t * kPanelTile);
  }
}

template <class Value>
int64_t bytes(const WeightShape& shape) {
  constexpr auto tile = Block<Value, uint8_t>::bytes_of_tile;
  return ceil_div(shape.in, kPanelTile) * (shape.out / kPanelRows * tile(kPanelRows) + tile(shape.out % kPanelRows));
}

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

// A tile's row between canonical and panel order.
void turn(const uint8_t* meta, const uint16_t* values, uint8_t* to_meta, uint16_t* to_values) {
  turn_pairs(meta, values, kPanelTile / 4, to_meta, to_values);
}
void turn(const uint8_t* meta, const float* values, uint8_t* to_meta, float* to_values) {
  std::memcpy(to_meta, meta, kPanelTile / 8);
  std::memcpy(to_values, values, kPanelTile / 2 * 4);
}

template <class Value>
void pack(const WeightShape& shape, const CanonicalWeight& from, void* packed) {
  const Canonical canonical{shape.in};
  std::memset(packed, 0, static_cast<size_t>(bytes<Value>(shape)));
  for_each_row<Value>(static_cast<uint8_t*>(packed), shape, [&](uint8_t* meta, uint8_t* kept, int64_t row, int64_t k) {
    uint8_t ascending[kPanelTile / 8];
    Value values[kPanelTile / 2] = {}, turned[kPanelTile / 2];
    canonical.read(from.indices + row * canonical.bytes_per_row(), k, kPanelTile, ascending);
    std::memcpy(values, static_cast<const Value*>(from.values) + row * canonical.values_per_row() + k / 2,
                static_cast<size_t>(least(kPanelTile, shape.in - k) / 2) * sizeof(Value));
    turn(ascending, values, meta, turned);
    std::memcpy(kept, turned, sizeof turned);
  });
}

template <class Value>
void unpack(const WeightShape& shape, const void* packed, const CanonicalOutput& to) {
  const Canonical canonical{shape.in};
  const auto visit = [&](const uint8_t* meta, const uint8_t* kept, int64_t row, int64_t k) {
    uint8_t ascending[kPanelTile / 8];
    Value values[kPanelTile / 2], turned[kPanelTile / 2];
    std::memcpy(turned, kept, sizeof turned);
    turn(meta, turned, ascending, values);
    canonical.write(to.indices + row * canonical.bytes_per_row(), k, kPanelTile, ascending);
    std::memcpy(static_cast<Value*>(to.values) + row * canonical.values_per_row() + k / 2, values,
                static_cast<size_t>(least(kPanelTile, shape.in - k) / 2) * sizeof(Value));
  };
  for_each_row<Value>(static_cast<const uint8_t*>(packed), shape, visit);
}

constexpr int64_t kAtOnce = 96;  // rows: a rectangle of 96 x 64 floats fits L1 beside what is written
static_assert(kPanelRows % kAtOnce == 0 && kRefillRows % kPanelRows == 0);

// Inputs inside, so that what a core fetches ahead along the weight's rows is still in L2 when its turn comes.
template <class Value, class Source>
void refill_from(const WeightShape& shape, const ValueSource& from, int64_t begin, int64_t end, void* packed) {
  Source source;
  for (int64_t first = begin; first < end; first += kAtOnce) {
    const Block<Value, uint8_t> block(static_cast<uint8_t*>(packed), first, shape.out, shape.in);
    const int64_t count = least(kAtOnce, shape.out - first);
    for (int64_t k = 0; k < shape.in; k += kPanelTile) {
      source.load(from, first, count, k, least(kPanelTile, shape.in - k));
      const uint8_t* metas = block.meta(k / kPanelTile, first - block.first);
      uint8_t* values = block.values(k / kPanelTile, first - block.first);
      for (int64_t r = 0; r < count; r++) {
        uint64_t meta;
        std::memcpy(&meta, metas + r * 8, 8);
        source.pick(r, meta, values + r * block.kRowBytes);
      }
    }
  }
}
template <class Value>
void refill(const WeightShape& shape, const ValueSource& from, int64_t begin, int64_t end, void* packed) {
  if (from.indices != nullptr) refill_from<Value, KeptRectangle<Value, kAtOnce, false>>(shape, from, begin, end, packed);
  else refill_from<Value, Rectangle<Value, kAtOnce>>(shape, from, begin, end, packed);
}

}  // namespace

#define TWOFOUR_PANELS(name, Value)                                                                         \
  int64_t name##_layout__bytes(const WeightShape& shape) { return bytes<Value>(shape); }                    \
  void name##_layout__pack(const WeightShape& shape, const CanonicalWeight& from, void* packed) {           \
    pack<Value>(shape, from, packed);                                                                       \
  }                                                                                                         \
  void name##_layout__unpack(const WeightShape& shape, const void* packed, const CanonicalOutput& to) {     \
    unpack<Value>(shape, packed, to);                                                                       \
  }                                                                                                         \
  void name##_layout__refill(const WeightShape& shape, const ValueSource& from, int64_t begin, int64_t end, \
                             void* packed) {                                                                \
    refill<Value>(shape, from, begin, end, packed);                                                         \
  }
TWOFOUR_PANELS(panels, float)
TWOFOUR_PANELS(bf16_panels, uint16_t)
#undef TWOFOUR_PANELS

}  // namespace twofour
