// A weight of two regions: 2:4, and groups of four inputs that are dense in every row. Four dense values are two groups of 2:4 on
// the same inputs, so the weight stands as one of 2:4 over inputs of which those of the dense groups stand there twice. Behind
// the header: how many groups are dense, int32, their numbers, ascending, int32 each, filled up to 64 bytes; then the weight
// (out, in + 4 dense) in a layout of 2:4, the last two values of the dense groups behind all inputs, group by group.
#pragma once

#include <cstdint>

#include "native/integers.h"

namespace twofour {

constexpr int64_t kGroup = 4;

struct Regions {
  const char* bytes;  // behind the header

  int64_t dense() const { return *reinterpret_cast<const int32_t*>(bytes); }
  const int32_t* groups() const { return reinterpret_cast<const int32_t*>(bytes) + 1; }
  const char* weight() const { return bytes + head(dense()); }
  static int64_t head(int64_t dense) { return round_up(4 * (1 + dense), 64); }

  // Whether all numbers are those of groups of so many inputs: a call looks, since they say what is read.
  bool sound(int64_t inputs) const {
    const int64_t count = dense();
    for (int64_t g = 0; g < count; g++)
      if (groups()[g] < 0 || groups()[g] >= inputs / kGroup) return false;
    return true;
  }
};

}  // namespace twofour
