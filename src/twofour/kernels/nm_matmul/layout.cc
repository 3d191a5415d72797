// Packing to and from the kernels' layouts: portable, no instruction set assumed, nothing outside the buffers touched.
#include "layout.h"

#include <bit>
#include <cstring>

namespace twofour {
namespace {

static_assert(std::endian::native == std::endian::little, "metadata words are built from canonical bytes in order");

// Two groups of the legal code (0, 1), used for inputs past `in` and rows past `out`; their values are zero.
constexpr uint8_t kPaddingByte = 0x44;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t panel_meta_bytes(int64_t rows) { return ceil_div(rows * 8, 64) * 64; }
int64_t panel_tile_bytes(int64_t rows) { return panel_meta_bytes(rows) + rows * kPanelTile / 2 * 4; }

struct Canonical {
  int64_t in;
  int64_t values_per_row() const { return in / 2; }
  int64_t bytes_per_row() const { return ceil_div(in, 8); }

  // Metadata of inputs [k, k + span) of one row, span a multiple of 8, padded past `in`.
  void read(const uint8_t* row, int64_t k, int64_t span, uint8_t* out) const {
    std::memset(out, kPaddingByte, static_cast<size_t>(span / 8));
    const int64_t groups = least(span, in - k) / 4;
    if (groups <= 0) return;
    std::memcpy(out, row + k / 8, static_cast<size_t>(ceil_div(groups, 2)));
    if (groups % 2 != 0) out[groups / 2] = static_cast<uint8_t>((out[groups / 2] & 0x0f) | (kPaddingByte & 0xf0));
  }
  void write(uint8_t* row, int64_t k, int64_t span, const uint8_t* from) const {
    const int64_t groups = least(span, in - k) / 4;
    if (groups <= 0) return;
    std::memcpy(row + k / 8, from, static_cast<size_t>(ceil_div(groups, 2)));
    if (groups % 2 != 0) row[k / 8 + groups / 2] &= 0x0f;
  }
};

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
  std::memset(packed, 0, static_cast<size_t>(layout_bytes(Layout::panels, out, in)));
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

}  // namespace

bool layout_from_name(const char* name, Layout* layout) {
  if (std::strcmp(name, "panels") == 0) return *layout = Layout::panels, true;
  if (std::strcmp(name, "rows") == 0) return *layout = Layout::rows, true;
  return false;
}

int64_t layout_bytes(Layout layout, int64_t out, int64_t in) {
  if (layout == Layout::rows) return ceil_div(out, 2 * kRowUnit) * 2 * ceil_div(in, kRowTile) * kRowUnitBytes;
  const int64_t full = out / kPanelRows, rest = out % kPanelRows;
  return ceil_div(in, kPanelTile) * (full * panel_tile_bytes(kPanelRows) + panel_tile_bytes(rest));
}

void layout_pack(Layout layout, const float* values, const uint8_t* indices, int64_t out, int64_t in, void* packed) {
  auto* bytes = static_cast<uint8_t*>(packed);
  if (layout == Layout::rows) return pack_rows(values, indices, out, in, bytes);
  pack_panels(values, indices, out, in, bytes);
}

void layout_unpack(Layout layout, const void* packed, int64_t out, int64_t in, float* values, uint8_t* indices) {
  const auto* bytes = static_cast<const uint8_t*>(packed);
  if (layout == Layout::rows) return unpack_rows(bytes, out, in, values, indices);
  unpack_panels(bytes, out, in, values, indices);
}

}  // namespace twofour
