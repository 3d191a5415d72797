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

  // A weight without zero points is read as 16 (q - 8) from the upper half of a byte, which has the sign: no subtraction.
  template <bool Zeros>
  static constexpr float kTimes = Zeros ? 1.0f : 16.0f;

  static TWOFOUR_INLINE void fetch(const uint8_t* line) {
    _mm_prefetch(reinterpret_cast<const char*>(line) + kFar, _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(line) + kNear, _MM_HINT_NTA);
  }

  // The half bytes of a line that belong to an even or an odd step, as numbers with a sign.
  template <bool Zeros>
  static TWOFOUR_INLINE V::ints values(V::U line, V::ints zero, bool odd) {
    if constexpr (Zeros) return (V::ints)((Bytes)((odd ? line >> 4 : line) & 0x0f0f0f0fu) - (Bytes)zero);
    const V::U upper = odd ? line : line << 4;
#if defined(TWOFOUR_SET_avx512_vnni)
    return _mm512_ternarylogic_epi32((V::ints)upper, _mm512_set1_epi8(-16), _mm512_set1_epi8(-128), 0x6a);  // (a & b) ^ c
#else
    return (V::ints)((upper & 0xf0f0f0f0u) ^ 0x80808080u);
#endif
  }

  // The values beside the indices at bits 8 s + 0, 2, 4, 6 of a lane's codes, which belong to its bytes 0 ... 3: two groups of
  // two.
  static TWOFOUR_INLINE V::Octet octet(V::ints values, V::ints codes, int s) {
#if defined(TWOFOUR_SET_avx512_vbmi)
    const auto apart = _mm512_set1_epi64(0x2624222006040200 + 0x0808080808080808 * s);
    return V::octet(values, _mm512_multishift_epi64_epi8(apart, codes));
#elif defined(TWOFOUR_SET_avx512_vnni)
    // The two bytes of codes with those of s to both words of a lane, those of a group to the lowest bits of a word each,
    // which looks up both places.
    const V::ints half = s < 2 ? _mm512_set4_epi32(0x0d0c0d0c, 0x09080908, 0x05040504, 0x01000100)
                               : _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
    const V::ints table = _mm512_setr_epi32(
        0x00010000, 0x00030002, 0x01010100, 0x01030102, 0x02010200, 0x02030202, 0x03010300, 0x03030302,
        0x04050404, 0x04070406, 0x05050504, 0x05070506, 0x06050604, 0x06070606, 0x07050704, 0x07070706);
    const V::ints found = _mm512_srlv_epi16(_mm512_shuffle_epi8(codes, half), _mm512_set1_epi32(0x00040000 + 0x00080008 * (s % 2)));
    const V::ints index = _mm512_ternarylogic_epi32(found, _mm512_set1_epi16(15), _mm512_set1_epi32(0x00100000), 0xea);  // (a & b) | c
    return {values, _mm512_permutexvar_epi16(index, table)};
#else
    const V::U four = (V::U)codes >> 8 * s, two = (four & 15) | (four & 0xf0) << 12;
    return V::octet(values, (V::ints)(two | two << 6));
#endif
  }

  // The values of a vector: half bytes cut apart, their zero points off: 1.5 instructions wide, 2.5 with zero points. Two make
  // the permutation; narrow: ten.
  template <int T, int N, bool Zeros>
  static TWOFOUR_INLINE void add_block(const uint8_t* block, const uint8_t* x, const V::ints (&zero)[N],
                                       V::ints (&high)[N][T], V::ints (&low)[N][T]) {
    V::ints codes[N];
    TWOFOUR_UNROLL
    for (int v = 0; v < N; v++) {
      const uint8_t* at = block + lane_bytes<Sparse>(v * V::width);
      codes[v] = V::load_index(at);
      TWOFOUR_UNROLL
      for (int line = 0; line < 3; line++)
        if (v * V::width % kInt4Half == 0) fetch(at + line * 64);
    }
    TWOFOUR_UNROLL
    for (int s = 0; s < 4; s++) {
      V::Octet octets[N];
      TWOFOUR_UNROLL
      for (int v = 0; v < N; v++) {
        const auto line = (V::U)V::load_index(block + lane_bytes<Sparse>(v * V::width) + 64 + s / 2 * 64);
        octets[v] = octet(values<Zeros>(line, zero[v], s % 2 == 1), codes[v], s);
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
