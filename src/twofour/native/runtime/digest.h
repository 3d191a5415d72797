// XXH64, a digest of bytes that finds damage, not malice: four lanes of multiplications, faster than memory is read
// (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace twofour {

inline uint64_t digest(const char* data, uint64_t size, uint64_t seed = 0) {
  constexpr uint64_t p1 = 0x9E3779B185EBCA87, p2 = 0xC2B2AE3D27D4EB4F, p3 = 0x165667B19E3779F9, p4 = 0x85EBCA77C2B2AE63,
                     p5 = 0x27D4EB2F165667C5;
  const auto word = [](const char* at) {
    uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
  };
  const auto round = [](uint64_t lane, uint64_t value) { return std::rotl(lane + value * p2, 31) * p1; };
  const char* const end = data + size;
  uint64_t all = seed + p5;
  if (size >= 32) {
    uint64_t a = seed + p1 + p2, b = seed + p2, c = seed, d = seed - p1;
    for (; end - data >= 32; data += 32)
      a = round(a, word(data)), b = round(b, word(data + 8)), c = round(c, word(data + 16)), d = round(d, word(data + 24));
    all = std::rotl(a, 1) + std::rotl(b, 7) + std::rotl(c, 12) + std::rotl(d, 18);
    for (const uint64_t lane : {a, b, c, d}) all = (all ^ round(0, lane)) * p1 + p4;
  }
  all += size;
  for (; end - data >= 8; data += 8) all = std::rotl(all ^ round(0, word(data)), 27) * p1 + p4;
  if (end - data >= 4) {
    uint32_t half;
    std::memcpy(&half, data, sizeof half);
    all = std::rotl(all ^ half * p1, 23) * p2 + p3;
    data += 4;
  }
  for (; data < end; data++) all = std::rotl(all ^ static_cast<unsigned char>(*data) * p5, 11) * p1;
  all = (all ^ all >> 33) * p2;
  all = (all ^ all >> 29) * p3;
  return all ^ all >> 32;
}

}  // namespace twofour
