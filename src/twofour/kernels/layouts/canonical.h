// Reading and writing the index stream of the canonical 2:4 form, a row at a time. For layout sources, which assume no
// instruction set; internal linkage.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "native/integers.h"

namespace {

static_assert(std::endian::native == std::endian::little, "metadata words are built from canonical bytes in order");

// Two groups of the legal code (0, 1), used for inputs past `in` and rows past `out`; their values are zero.
constexpr uint8_t kPaddingByte = 0x44;

// The code of a group.
inline unsigned nibble_of(const uint8_t* meta, int64_t group) { return meta[group / 2] >> (group % 2 * 4) & 15u; }

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

}  // namespace
