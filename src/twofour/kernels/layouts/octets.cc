// Packing to and from the layout "int8_rows": portable, no instruction set assumed, nothing outside the buffers touched.
#include "octets.h"

#include <cstring>

#include "canonical.h"
#include "layout.h"

namespace twofour {
namespace {

// Transposes a 4 x 4 matrix of 2-bit indices: byte b, index i <-> byte i, index b. Its own inverse. Canonical bytes are
// octets of inputs and hold one index per kept value; a lane of the kernel is a kept value and shifts through octets.
uint32_t transposed(uint32_t m) {
  uint32_t t = (m ^ (m >> 12)) & 0x0000f0f0;
  m ^= t ^ (t << 12);
  t = (m ^ (m >> 6)) & 0x00cc00cc;
  return m ^ t ^ (t << 6);
}

// Where value i of the row's tile stands in a half unit.
int64_t place(int64_t r, int64_t i) { return kRowUnit * 4 + i / 4 * kRowUnit * 4 + r * 4 + i % 4; }

void pack_row(const Canonical& canonical, const int8_t* values, const uint8_t* indices, int64_t k, int64_t r,
              uint8_t* unit) {
  uint8_t meta[kRowTile / 8];
  canonical.read(indices, k, kRowTile, meta);
  uint32_t word;
  std::memcpy(&word, meta, 4);
  word = transposed(word);
  std::memcpy(unit + r * 4, &word, 4);
  for (int64_t i = 0; i < least(kRowTile, canonical.in - k) / 2; i++)
    std::memcpy(unit + place(r, i), values + k / 2 + i, 1);
}

void unpack_row(const Canonical& canonical, const uint8_t* unit, int64_t k, int64_t r, int8_t* values,
                uint8_t* indices) {
  uint32_t word;
  std::memcpy(&word, unit + r * 4, 4);
  word = transposed(word);
  uint8_t meta[kRowTile / 8];
  std::memcpy(meta, &word, 4);
  canonical.write(indices, k, kRowTile, meta);
  for (int64_t i = 0; i < least(kRowTile, canonical.in - k) / 2; i++)
    std::memcpy(values + k / 2 + i, unit + place(r, i), 1);
}

}  // namespace

int64_t int8_rows_layout__bytes(const WeightShape& shape) {
  const int64_t units = int8_padded_rows(shape.out) / kRowUnit * ceil_div(shape.in, kRowTile);
  return int8_head_bytes(shape.out) + units * kOctetHalfBytes;
}

void pack_int8_head(const WeightShape& shape, const CanonicalWeight& from, uint8_t* to) {
  const int64_t kept = shape.in / 2;
  const auto* values = static_cast<const int8_t*>(from.values);
  uint8_t* sums = to + int8_padded_rows(shape.out) * 4;
  for (int64_t row = 0; row < shape.out; row++) {
    const float scale = from.scales == nullptr ? 1.0f : from.scales[row];
    std::memcpy(to + row * 4, &scale, 4);
    int32_t sum = 0;
    for (int64_t i = 0; i < kept; i++) sum += values[row * kept + i];
    std::memcpy(sums + row * 4, &sum, 4);
  }
}

void int8_rows_layout__pack(const WeightShape& shape, const CanonicalWeight& from, void* packed) {
  const Canonical canonical{shape.in};
  const auto* values = static_cast<const int8_t*>(from.values);
  auto* to = static_cast<uint8_t*>(packed);
  std::memset(to, 0, static_cast<size_t>(int8_rows_layout__bytes(shape)));
  pack_int8_head(shape, from, to);
  uint8_t* units = to + int8_head_bytes(shape.out);
  for_each_half_unit<kOctetHalfBytes>(units, shape, [&](uint8_t* unit, int64_t first, int64_t k) {
    for (int64_t r = 0; r < least(kRowUnit, shape.out - first); r++)
      pack_row(canonical, values + (first + r) * canonical.values_per_row(),
               from.indices + (first + r) * canonical.bytes_per_row(), k, r, unit);
  });
}

void int8_rows_layout__unpack(const WeightShape& shape, const void* packed, const CanonicalOutput& to) {
  const Canonical canonical{shape.in};
  const auto* from = static_cast<const uint8_t*>(packed);
  auto* values = static_cast<int8_t*>(to.values);
  std::memcpy(to.scales, from, static_cast<size_t>(shape.out) * 4);
  const auto visit = [&](const uint8_t* unit, int64_t first, int64_t k) {
    for (int64_t r = 0; r < least(kRowUnit, shape.out - first); r++)
      unpack_row(canonical, unit, k, r, values + (first + r) * canonical.values_per_row(),
                 to.indices + (first + r) * canonical.bytes_per_row());
  };
  for_each_half_unit<kOctetHalfBytes>(from + int8_head_bytes(shape.out), shape, visit);
}

}  // namespace twofour
