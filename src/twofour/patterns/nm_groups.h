// Groups of an N:M pattern counted in the bits of nm_nonzero.
#pragma once

#include <cstdint>

namespace twofour {

constexpr int kNmGroupsLargest = 64;

// A weight as it lies in memory, (outer, length, inner): groups of m lie along `length`, their values `inner` apart.
struct NmGroups {
  const uint8_t* bits;  // of outer * length * inner values, and 8 bytes more that may be read
  int64_t outer, length, inner;
  int n, m;
  bool pairs;  // n / 2 of m / 2 aligned pairs; a pair is not zero when one of its values is not
  bool stop;   // at the first offending group: only whether there is one is asked
};

struct NmGroupsFound {
  int64_t offending;  // groups with more than n non-zero values
  int64_t spare;      // groups with fewer than n
  // The first value of the first offending group, in the order (outer, inner, length), as an index into memory; -1: none.
  int64_t first;
};

NmGroupsFound nm_groups(const NmGroups& a);

}  // namespace twofour
