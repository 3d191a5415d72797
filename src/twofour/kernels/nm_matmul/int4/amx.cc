// The AMX row.
#include "kernels/int4/tiles.h"
#include "kernels/nm_matmul/nm_matmul.h"

namespace {

using twofour::kInt4BlockBytes;

// The 2:4 weight: values less their zero points, at their places among zeros.
struct Sparse {
  static constexpr int64_t kBlockBytes = kInt4BlockBytes;
  static constexpr bool kOffset = false;
  static constexpr int64_t kFar = 42 * kInt4BlockBytes, kNear = 10 * kInt4BlockBytes;

  // A lane holds the two values of two groups. Byte j of a dense lane takes value 0 where the code's first index is j,
  // value 1 where its second is, else nothing (the top bit makes vpshufb write zero). Codes that are illegal: 0.
  static __m512i shuffles() {
    return _mm512_setr_epi32(0, 0, 0, 0, static_cast<int>(0x80800100), 0, 0, 0, static_cast<int>(0x80018000),
                             static_cast<int>(0x80010080), 0, 0, static_cast<int>(0x01808000),
                             static_cast<int>(0x01800080), static_cast<int>(0x01008080), 0);
  }

  // 16 rows x 32 inputs -> 8 lines of 16 rows x 4 inputs.
  static TWOFOUR_INLINE void expand(const uint8_t* half, __m512i zero, uint8_t* to) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i lane = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
    const __m512i place[2] = {lane, _mm512_or_si512(lane, _mm512_set1_epi8(2))};
    const __m512i look_up = shuffles();
    __m512i codes = _mm512_loadu_si512(half);
    TWOFOUR_UNROLL
    for (int s = 0; s < 4; s++) {
      if (s < 3) prefetch<kNear, kFar>(half + s * 64);
      const __m512i line = _mm512_loadu_si512(half + 64 + s / 2 * 64);
      const __m512i w =
          _mm512_sub_epi8(_mm512_and_si512(s % 2 == 0 ? line : _mm512_srli_epi16(line, 4), nibble), zero);
      TWOFOUR_UNROLL
      for (int g = 0; g < 2; g++) {
        const __m512i from = _mm512_or_si512(_mm512_permutexvar_epi32(codes, look_up), place[g]);
        _mm512_store_si512(to + (2 * s + g) * 64, _mm512_shuffle_epi8(w, from));
        codes = _mm512_srli_epi32(codes, 4);
      }
    }
  }
  template <int sum, int x, int w>
  static TWOFOUR_INLINE void dot() {
    TileUnit::dot_ss<sum, x, w>();
  }
};

}  // namespace

namespace twofour {

int64_t nm_matmul_2x4_int4_rows__amx__workspace(const Matmul& a) { return piece_product_workspace(a); }
void nm_matmul_2x4_int4_rows__amx(const Matmul& a) { piece_product<Sparse>(a); }

}  // namespace twofour
