// Values that a mask lets go become +0, whatever they held.
#pragma once

#include <cstdint>
#include <cstring>

namespace twofour {

// `keep`: a byte a value, 0 lets go. A run of values that stay as they are is not written to: its cache lines stay clean.
// Vectors are the compiler's own, since memory is what this waits for.
template <class Bits>
void fill_pruned(Bits* values, const uint8_t* keep, int64_t count) {
  constexpr int64_t kRun = 32;
  int64_t i = 0;
  for (; i + kRun <= count; i += kRun) {
    Bits kept[kRun], lost = 0;
    for (int64_t j = 0; j < kRun; ++j) {
      const Bits mask = static_cast<Bits>(-static_cast<Bits>(keep[i + j] != 0));
      kept[j] = static_cast<Bits>(values[i + j] & mask);
      lost = static_cast<Bits>(lost | (values[i + j] & ~mask));
    }
    if (lost != 0) std::memcpy(values + i, kept, sizeof kept);
  }
  for (; i < count; ++i)
    if (keep[i] == 0) values[i] = 0;
}

}  // namespace twofour
