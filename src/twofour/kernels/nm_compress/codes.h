// The index codes of two groups at once, and the loop over rows that every compress kernel shares. Internal linkage.
#pragma once

#include "native/parallel.h"
#include "nm_compress.h"

namespace twofour {
namespace {

// Byte b: the two nibble codes of keep bits b (two groups); only the 36 values with two bits a group occur.
struct Codes {
  uint8_t of[256] = {};
  constexpr Codes() {
    for (int bits = 0; bits < 256; ++bits)
      for (int half = 0; half < 2; ++half) {
        int shift = 0, code = 0;
        for (int i = 0; i < 4; ++i)
          if (bits >> (4 * half + i) & 1 && shift < 4) {
            code |= i << shift;
            shift += 2;
          }
        of[bits] = static_cast<uint8_t>(of[bits] | code << (4 * half));
      }
  }
};
constexpr Codes kCodes;

// Runs compress_row(row, columns, values, indices) on every row and adds up what it dropped.
template <class Row>
inline int64_t compress_rows(const NmCompress& a, const Row& compress_row) {
  int64_t dropped = 0;
  int64_t* total = &dropped;
  parallel_for(a.rows, 1, a.threads, [&](int64_t begin, int64_t end) {
    int64_t mine = 0;
    for (int64_t r = begin; r < end; ++r)
      mine += compress_row(a.weight + r * a.stride, a.columns, a.values + r * (a.columns / 2),
                           a.indices + r * ((a.columns + 7) / 8));
    __atomic_fetch_add(total, mine, __ATOMIC_RELAXED);
  });
  return dropped;
}

}  // namespace
}  // namespace twofour
