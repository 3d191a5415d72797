// Sums of a unit of "int8_rows" for some tokens: 32 outputs and 32 inputs, the kept values and their indices as
// nm_matmul/int8/README.md draws them. Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>

#include "kernels/byte_dots.h"
#include "kernels/layouts/octets.h"
#include "native/compiler.h"

namespace {

using twofour::kOctetHalfBytes;
using twofour::kRowTile;
using twofour::kRowUnit;

// Sets of sums that are kept apart until the end: registers for two, or for four of few sums that wait for each other.
template <class V>
constexpr int octet_sets(int sums) {
  return sets_of_sums(sums) >= 4 ? 4 : sums * 2 <= V::sums ? 2 : 1;
}

// One unit (Halves x 16 outputs, 32 inputs) against T tokens, of which x(token, octet) are eight inputs. Metadata is a dword
// for an output and 32 inputs: the next index of each byte is a shift. Two sets of sums where registers allow, so that few
// tokens are not bound by the latency of the dot product. fetch(line) asks for weights behind a line that is read.
template <class V, int T, int Halves, int Sets, class Inputs, class Fetch>
TWOFOUR_INLINE void add_octets(const uint8_t* unit, const Inputs& x, const Fetch& fetch,
                               typename V::ints (&acc)[Sets][Halves * (kRowUnit / V::width)][T]) {
  static_assert(kRowTile / 8 % Sets == 0);
  constexpr int per_half = kRowUnit / V::width;
  constexpr int vectors = Halves * per_half;
  typename V::ints meta[vectors];
  const uint8_t* values[vectors];
  TWOFOUR_UNROLL
  for (int v = 0; v < vectors; v++) {
    const uint8_t* half = unit + v / per_half * kOctetHalfBytes + v % per_half * V::width * 4;
    meta[v] = V::load_ints(half);
    values[v] = half + kRowUnit * 4;
  }
  TWOFOUR_UNROLL
  for (int o = 0; o < kRowTile / 8; o++) {
    typename V::Octet octet[vectors];
    TWOFOUR_UNROLL
    for (int v = 0; v < vectors; v++) {
      const uint8_t* at = values[v] + o * kRowUnit * 4;
      octet[v] = V::octet(V::load_ints(at), meta[v]);
      meta[v] = V::next_index(meta[v]);
      fetch(at);
    }
    TWOFOUR_UNROLL
    for (int t = 0; t < T; t++) {
      const auto eight = V::broadcast8(x(t, o));
      TWOFOUR_UNROLL
      for (int v = 0; v < vectors; v++) acc[o % Sets][v][t] = V::dot(acc[o % Sets][v][t], eight, octet[v]);
    }
  }
}

}  // namespace
