// The header that stands in front of a layout: `_STRUCT` of packing/header.py, little-endian.
#pragma once

#include <cstdint>
#include <cstring>

namespace twofour {

// `group`: inputs per scale, its highest bit set where the groups have zero points.
struct LayoutHeader {
  char magic[4];
  uint16_t version, group;
  char pattern[12], dtype[12], layout[16];
  int64_t rows, columns;

  bool made_for(const char* wanted_dtype, const char* wanted_layout, int64_t out, int64_t in) const {
    return std::memcmp(magic, "24PK", 4) == 0 && version == 1 &&
           std::strncmp(dtype, wanted_dtype, sizeof dtype) == 0 &&
           std::strncmp(layout, wanted_layout, sizeof layout) == 0 && rows == out && columns == in;
  }
};
static_assert(sizeof(LayoutHeader) == 64);
constexpr uint16_t kZerosBit = 0x8000;

}  // namespace twofour
