// The 2:4 weight of row_products.h: the eight inputs that a lane's four values are kept from are broadcast and permuted.
// Internal linkage.
#pragma once

#include "kernels/int4/row_products.h"
#include "kernels/octet_lanes.h"

namespace {

using twofour::kInt4BlockBytes;

struct Sparse {
  using V = OctetLanes;
  typedef uint8_t Bytes __attribute__((vector_size(4 * V::width)));
  static constexpr int64_t kBlockBytes = kInt4BlockBytes;
  static constexpr bool kUnsigned = true;  // vpdpbusd has one operand with a sign: the weights less their zero points
  static constexpr int64_t kFar = 42 * kInt4BlockBytes, kNear = 10 * kInt4BlockBytes;

  static TWOFOUR_INLINE void prefetch(const uint8_t* at) {
    TWOFOUR_UNROLL
    for (int line = 0; line < 3; line++) {
      _mm_prefetch(reinterpret_cast<const char*>(at) + line * 64 + kFar, _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(at) + line * 64 + kNear, _MM_HINT_NTA);
    }
  }

  // The indices at bits 8 s + 0, 2, 4, 6 of a lane's codes to the lowest bits of its bytes 0 ... 3: two groups of two.
  static TWOFOUR_INLINE V::ints indices(V::ints codes, int s) {
#if defined(TWOFOUR_SET_avx512_vnni)
    return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x2624222006040200 + 0x0808080808080808 * s), codes);
#else
    const V::U four = (V::U)codes >> 8 * s, two = (four & 15) | (four & 0xf0) << 12;
    return (V::ints)(two | two << 6);
#endif
  }

  // The values of a vector: half bytes cut apart, their zero points off. Wide: 1.5 instructions cut, one subtracts, two make the
  // permutation; narrow: ten make it.
  template <int T, int N>
  static TWOFOUR_INLINE void add_block(const uint8_t* block, const uint8_t* x, const V::ints (&zero)[N],
                                       V::ints (&high)[N][T], V::ints (&low)[N][T]) {
    V::ints codes[N];
    TWOFOUR_UNROLL
    for (int v = 0; v < N; v++) {
      const uint8_t* at = block + lane_bytes<Sparse>(v * V::width);
      codes[v] = V::load_index(at);
      if (v * V::width % kInt4Half == 0) prefetch(at);
    }
    TWOFOUR_UNROLL
    for (int s = 0; s < 4; s++) {
      V::Octet octets[N];
      TWOFOUR_UNROLL
      for (int v = 0; v < N; v++) {
        const auto line = (V::U)V::load_index(block + lane_bytes<Sparse>(v * V::width) + 64 + s / 2 * 64);
        const auto values = (Bytes)((s % 2 == 0 ? line : line >> 4) & 0x0f0f0f0fu) - (Bytes)zero[v];
        octets[v] = V::octet((V::ints)values, indices(codes[v], s));
      }
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) {
        const auto x_high = V::broadcast8(x + (s * T + t) * 16), x_low = V::broadcast8(x + (s * T + t) * 16 + 8);
        TWOFOUR_UNROLL
        for (int v = 0; v < N; v++) {
          high[v][t] = V::dot(high[v][t], x_high, octets[v]);
          low[v][t] = V::dot(low[v][t], x_low, octets[v]);
        }
      }
    }
  }
};

}  // namespace
