#include <immintrin.h>

#include "codes.h"
#include "nm_compress.h"
#include "patterns/keep_avx512.h"

namespace twofour {
namespace {

inline int64_t compress_row(const float* w, int64_t columns, float* values, uint8_t* indices) {
  const __m512i magnitude_mask = _mm512_set1_epi32(0x7fffffff);
  int64_t dropped = 0;
  for (int64_t i = 0; i < columns; i += 16) {
    const int64_t left = columns - i;
    const __mmask16 lanes = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
    const __m512 x = _mm512_maskz_loadu_ps(lanes, w + i);
    const __m512i key = _mm512_and_si512(_mm512_castps_si512(x), magnitude_mask);
    const __mmask16 keep = keep_of_magnitudes(key);
    dropped += __builtin_popcount(_mm512_test_epi32_mask(key, key) & static_cast<__mmask16>(~keep));
    const __m512 packed = _mm512_maskz_compress_ps(keep, x);
    const __mmask16 half = left >= 16 ? 0x00ff : static_cast<__mmask16>((1u << (left / 2)) - 1);
    _mm512_mask_storeu_ps(values + i / 2, half, packed);
    indices[i / 8] = kCodes.of[keep & 0xff];
    if (left > 8) indices[i / 8 + 1] = kCodes.of[keep >> 8];
    if (left == 4) indices[i / 8] &= 0x0f;
    if (left == 12) indices[i / 8 + 1] &= 0x0f;
  }
  return dropped;
}

}  // namespace

int64_t nm_compress_2x4_f32__avx512(const NmCompress& a) { return compress_rows(a, compress_row); }

}  // namespace twofour
