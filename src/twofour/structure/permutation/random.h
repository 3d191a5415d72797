// Pseudo-random numbers that the Python reference repeats: SplitMix64 (Steele, Lea and Flood 2014).
#pragma once

#include <cstdint>

namespace twofour {

struct SplitMix64 {
  uint64_t state;

  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  // A number in [0, count).
  int64_t below(int64_t count) { return static_cast<int64_t>(next() % static_cast<uint64_t>(count)); }
};

}  // namespace twofour
