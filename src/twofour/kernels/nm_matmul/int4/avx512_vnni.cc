// The AVX-512 VNNI row: the eight inputs that a lane's four values are kept from are broadcast and permuted (vpermb).
#include "kernels/int4/row_products.h"
#include "kernels/nm_matmul/nm_matmul.h"

namespace {

using twofour::kInt4BlockBytes;
using twofour::kInt4HalfBytes;

struct Sparse {
  static constexpr int64_t kBlockBytes = kInt4BlockBytes;
  static constexpr bool kUnsigned = true;  // vpdpbusd has one operand with a sign: the weights less their zero points
  static constexpr int64_t kFar = 42 * kInt4BlockBytes, kNear = 10 * kInt4BlockBytes;

  static TWOFOUR_INLINE void prefetch(const uint8_t* half) {
    TWOFOUR_UNROLL
    for (int line = 0; line < 3; line++) {
      _mm_prefetch(reinterpret_cast<const char*>(half) + line * 64 + kFar, _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(half) + line * 64 + kNear, _MM_HINT_NTA);
    }
  }

  // 64 values: 1.5 instructions cut half bytes apart, one subtracts the zero point, two make the permutation.
  template <int T, int Halves>
  static TWOFOUR_INLINE void add_block(const uint8_t* block, const uint8_t* x, const __m512i (&zero)[Halves],
                                       __m512i (&high)[Halves][T], __m512i (&low)[Halves][T]) {
    const __m512i nibble = _mm512_set1_epi8(15), two_bits = _mm512_set1_epi8(3), second = _mm512_set1_epi32(0x04040000);
    __m512i codes[Halves];
    TWOFOUR_UNROLL
    for (int h = 0; h < Halves; h++) {
      codes[h] = _mm512_loadu_si512(block + h * kInt4HalfBytes);
      prefetch(block + h * kInt4HalfBytes);
    }
    TWOFOUR_UNROLL
    for (int s = 0; s < 4; s++) {
      // Bytes 0..3 of a lane get the indices at bits 8 s + 0, 2, 4, 6 of its codes: two groups of two.
      const __m512i bits = _mm512_set1_epi64(0x2624222006040200 + 0x0808080808080808 * s);
      __m512i w[Halves], from[Halves];
      TWOFOUR_UNROLL
      for (int h = 0; h < Halves; h++) {
        const __m512i line = _mm512_loadu_si512(block + h * kInt4HalfBytes + 64 + s / 2 * 64);
        w[h] = _mm512_and_si512(s % 2 == 0 ? line : _mm512_srli_epi16(line, 4), nibble);
        w[h] = _mm512_sub_epi8(w[h], zero[h]);
        from[h] = _mm512_multishift_epi64_epi8(bits, codes[h]);
        from[h] = _mm512_ternarylogic_epi32(from[h], two_bits, second, 0xea);  // (a & b) | c
      }
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) {
        const auto* at = reinterpret_cast<const long long*>(x + (s * T + t) * 16);
        const __m512i x_high = _mm512_set1_epi64(at[0]), x_low = _mm512_set1_epi64(at[1]);
        TWOFOUR_UNROLL
        for (int h = 0; h < Halves; h++) {
          high[h][t] = _mm512_dpbusd_epi32(high[h][t], _mm512_permutexvar_epi8(from[h], x_high), w[h]);
          low[h][t] = _mm512_dpbusd_epi32(low[h][t], _mm512_permutexvar_epi8(from[h], x_low), w[h]);
        }
      }
    }
  }
};

}  // namespace

namespace twofour {

int64_t nm_matmul_2x4_int4_rows__avx512_vnni__workspace(const Matmul& a) { return row_products_workspace(a); }
void nm_matmul_2x4_int4_rows__avx512_vnni(const Matmul& a) { row_products<Sparse>(a); }

}  // namespace twofour
