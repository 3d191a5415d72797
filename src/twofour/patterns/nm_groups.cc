#include "nm_groups.h"

#include <bit>
#include <cstring>

namespace twofour {
namespace {

// 64 bits from bit `at` on. Reads up to 8 bytes behind the one that holds it.
inline uint64_t bits_from(const uint8_t* bits, int64_t at) {
  uint64_t word;
  std::memcpy(&word, bits + at / 8, 8);
  const int shift = static_cast<int>(at % 8);
  return shift == 0 ? word : word >> shift | static_cast<uint64_t>(bits[at / 8 + 8]) << (64 - shift);
}

inline uint64_t below(int64_t count) { return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1; }

inline uint64_t pairs_of(uint64_t word) { return (word | word >> 1) & 0x5555555555555555ull; }

// The non-zero values of every field of m bits, m a power of two, in that field.
inline uint64_t field_counts(uint64_t x, int m) {
  x -= x >> 1 & 0x5555555555555555ull;
  if (m >= 4) x = (x & 0x3333333333333333ull) + (x >> 2 & 0x3333333333333333ull);
  if (m >= 8) x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0full;
  if (m >= 16) x = (x + (x >> 8)) & 0x00ff00ff00ff00ffull;
  if (m >= 32) x = (x + (x >> 16)) & 0x0000ffff0000ffffull;
  return m >= 64 ? (x + (x >> 32)) & 0xffffffffull : x;
}

// How many bits are set. The compiler's own is a call into a table here, since any CPU must run this file.
inline int set_bits(uint64_t x) {
  x -= x >> 1 & 0x5555555555555555ull;
  x = (x & 0x3333333333333333ull) + (x >> 2 & 0x3333333333333333ull);
  return static_cast<int>(((x + (x >> 4)) & 0x0f0f0f0f0f0f0f0full) * 0x0101010101010101ull >> 56);
}

// One bit of every field of m bits, the lowest of it.
inline uint64_t field_ones(int m) { return m == 64 ? 1 : ~uint64_t{0} / ((uint64_t{1} << m) - 1); }

// inner = 1 and m a power of two: no group lies across two words, and rows need not be told apart.
NmGroupsFound along_words(const NmGroups& a, int64_t groups) {
  const uint64_t ones = field_ones(a.m), top = ones << (a.m - 1);
  const int n = a.pairs ? a.n / 2 : a.n;
  // A count plus this reaches the field's top bit from n + 1, and from n, on.
  const uint64_t over = (top - ones) - ones * static_cast<uint64_t>(n), reach = top - ones * static_cast<uint64_t>(n);
  NmGroupsFound found = {0, groups, -1};
  for (int64_t g = 0; g < groups; g += 64 / a.m) {
    const uint64_t word = bits_from(a.bits, g * a.m) & below((groups - g) * a.m);
    const uint64_t counts = field_counts(a.pairs ? pairs_of(word) : word, a.m);
    const uint64_t offending = (counts + over) & top;
    found.offending += set_bits(offending);
    found.spare -= set_bits((counts + reach) & top);
    if (offending && found.first < 0) found.first = (g + __builtin_ctzll(offending) / a.m) * a.m;
    if (offending && a.stop) return found;
  }
  return found;
}

NmGroupsFound along_rows(const NmGroups& a, int64_t groups) {
  const int n = a.pairs ? a.n / 2 : a.n;
  NmGroupsFound found = {0, 0, -1};
  for (int64_t g = 0; g < groups; ++g) {
    const uint64_t word = bits_from(a.bits, g * a.m) & below(a.m);
    const int count = set_bits(a.pairs ? pairs_of(word) : word);
    found.spare += count < n;
    found.offending += count > n;
    if (count > n && found.first < 0) found.first = g * a.m;
    if (count > n && a.stop) return found;
  }
  return found;
}

// Counters of 64 lanes, bit k of lane i in bit i of plane k.
struct LaneCounts {
  uint64_t plane[7] = {};
  void add(uint64_t lanes) {
    for (int k = 0; lanes != 0 && k < 7; ++k) {
      const uint64_t carry = plane[k] & lanes;
      plane[k] ^= lanes;
      lanes = carry;
    }
  }
  // Lanes whose count is above n, and lanes whose count is n.
  void compare(int n, uint64_t* above, uint64_t* equal) const {
    *above = 0, *equal = ~uint64_t{0};
    for (int k = 6; k >= 0; --k) {
      const uint64_t wanted = n >> k & 1 ? ~uint64_t{0} : 0;
      *above |= *equal & plane[k] & ~wanted;
      *equal &= ~(plane[k] ^ wanted);
    }
  }
};

// Of up to 64 groups side by side, those with more than n non-zero values and those with n.
inline void compare_lanes(const NmGroups& a, int64_t at, uint64_t* above, uint64_t* equal) {
  if (a.m == 4 && a.n == 2 && !a.pairs) {
    uint64_t w, x, y, z;
    if (4 * a.inner <= 57) {  // the taps of a 3 x 3 kernel: one load holds the group
      std::memcpy(&w, a.bits + at / 8, 8);
      w >>= at % 8;
      x = w >> a.inner, y = w >> 2 * a.inner, z = w >> 3 * a.inner;
    } else {
      w = bits_from(a.bits, at), x = bits_from(a.bits, at + a.inner);
      y = bits_from(a.bits, at + 2 * a.inner), z = bits_from(a.bits, at + 3 * a.inner);
    }
    *above = (w & x & (y | z)) | (y & z & (w | x));
    *equal = ((w & x) | (y & z) | ((w | x) & (y | z))) & ~*above;
    return;
  }
  LaneCounts counts;
  for (int j = 0; j < a.m; j += a.pairs ? 2 : 1) {
    uint64_t lanes = bits_from(a.bits, at + j * a.inner);
    if (a.pairs) lanes |= bits_from(a.bits, at + (j + 1) * a.inner);
    counts.add(lanes);
  }
  counts.compare(a.pairs ? a.n / 2 : a.n, above, equal);
}

// Values `inner` apart.
NmGroupsFound across(const NmGroups& a) {
  const int64_t groups = a.length / a.m;
  NmGroupsFound found = {0, 0, -1};
  for (int64_t o = 0; o < a.outer; ++o) {
    int64_t lane = a.inner, group = 0;  // of the first offending group: the lowest lane, and its first group
    for (int64_t g = 0; g < groups && !(a.stop && found.offending); ++g)
      for (int64_t i = 0; i < a.inner; i += 64) {
        const int64_t at = (o * a.length + g * a.m) * a.inner + i;
        const uint64_t real = below(a.inner - i);
        uint64_t above, equal;
        compare_lanes(a, at, &above, &equal);
        above &= real;
        found.offending += set_bits(above);
        found.spare += set_bits(~(above | equal) & real);
        if (above && i + __builtin_ctzll(above) < lane) lane = i + __builtin_ctzll(above), group = g;
      }
    if (lane < a.inner && found.first < 0) found.first = (o * a.length + group * a.m) * a.inner + lane;
    if (found.offending && a.stop) return found;
  }
  return found;
}

}  // namespace

NmGroupsFound nm_groups(const NmGroups& a) {
  if (a.outer == 0 || a.length == 0 || a.inner == 0) return {0, 0, -1};
  if (a.inner > 1) return across(a);
  const int64_t groups = a.outer * a.length / a.m;
  return std::has_single_bit(static_cast<unsigned>(a.m)) ? along_words(a, groups) : along_rows(a, groups);
}

}  // namespace twofour
