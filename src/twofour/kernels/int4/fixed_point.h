// Activations as 16-bit fixed point, for integer multiplication: x = scale * q with one scale a token, q in
// -32639..32639, cut into two planes of bytes, q = 256 * high + low. And sums on their way out. AVX-512; internal
// linkage.
//
// The rounding error of a token is at most max |x| / 65278 a value: forty times below that of bfloat16 for values that
// are spread like a normal distribution.
#pragma once

#include <cstdint>

#include "kernels/epilogue_math.h"
#include "kernels/matmul.h"
#include "native/compiler.h"
#include "native/simd.h"

namespace {

using twofour::Matmul;
using twofour::Type;

constexpr float kSignedLargest = 127 * 256 + 127;  // of two signed bytes

TWOFOUR_INLINE __m512 from_bfloat16(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// 16 values of token `t` from input k on; k + 16 <= in_features rounded up to 16, zero past the end.
TWOFOUR_INLINE __m512 load_x(const Matmul& a, int64_t t, int64_t k) {
  const int64_t left = a.in_features - k;
  const auto mask = static_cast<__mmask16>(left >= 16 ? 0xffff : left <= 0 ? 0 : (1 << left) - 1);
  if (a.x_type == Type::f32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(a.x) + t * a.x_stride + k);
  const auto* from = static_cast<const uint16_t*>(a.x) + t * a.x_stride + k;
  return from_bfloat16(_mm256_maskz_loadu_epi16(mask, from));
}

// The scale of a token: NaN if a value is NaN or infinite, so that all its outputs become NaN; 1 for a row of zeros.
inline float scale_of(const Matmul& a, int64_t t, float largest) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i most = _mm512_setzero_si512();  // of the bits: NaN and infinity compare above every finite number
  for (int64_t k = 0; k < a.in_features; k += 16)
    most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_castps_si512(load_x(a, t, k)), magnitude));
  const int bits = _mm512_reduce_max_epi32(most);
  if (bits >= 0x7f800000) return __builtin_nanf("");
  const float scale = __builtin_bit_cast(float, bits) / largest;
  return scale >= 1.2e-38f ? scale : 1.0f;  // below, 1 / scale overflows: such a token counts as zero
}

TWOFOUR_INLINE __m512i round_x(const Matmul& a, int64_t t, int64_t k, __m512 inverse) {
  return _mm512_cvtps_epi32(_mm512_mul_ps(load_x(a, t, k), inverse));
}

// To nearest, ties to even; NaN stays NaN.
TWOFOUR_INLINE __m256i to_bfloat16(__m512 y) {
  const __m512i bits = _mm512_castps_si512(y);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(up, nan, _mm512_set1_epi32(0x7fc0)));
}

// Bias and epilogue of 16 outputs of one token, stored as y's type.
TWOFOUR_INLINE void finish(const Matmul& a, int64_t t, int64_t row, __m512 y) {
  const int64_t left = a.out_features - row;
  const auto mask = static_cast<__mmask16>(left >= 16 ? 0xffff : (1 << left) - 1);
  const bool wide = a.y_type == Type::f32;
  if (a.bias != nullptr) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, a.bias + row));
  if (!a.epilogue.plain()) {
    y = apply_activation<Lanes>(y, a.epilogue.activation);
    const int64_t at = t * a.epilogue.other_stride + row;
    if (a.epilogue.combine != Combine::none)
      y = apply_combine<Lanes>(
          y,
          wide ? _mm512_maskz_loadu_ps(mask, static_cast<const float*>(a.epilogue.other) + at)
               : from_bfloat16(_mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(a.epilogue.other) + at)),
          a.epilogue.combine);
  }
  if (wide)
    _mm512_mask_storeu_ps(static_cast<float*>(a.y) + t * a.y_stride + row, mask, y);
  else
    _mm256_mask_storeu_epi16(static_cast<uint16_t*>(a.y) + t * a.y_stride + row, mask, to_bfloat16(y));
}

// 16 bfloat16 scales as floats.
TWOFOUR_INLINE __m512 load_scales(const uint8_t* from) {
  return from_bfloat16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// The zero points of `load_zeros` as floats.
TWOFOUR_INLINE __m512 zero_floats(__m512i zeros) {
  return _mm512_cvtepi32_ps(_mm512_and_si512(zeros, _mm512_set1_epi32(15)));
}

// 16 zero points, each in the four bytes of its row's lane.
TWOFOUR_INLINE __m512i load_zeros(const uint8_t* from) {
  const __m512i four = _mm512_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0, 0x0c0c0c0c, 0x08080808, 0x04040404, 0,
                                        0x0c0c0c0c, 0x08080808, 0x04040404, 0, 0x0c0c0c0c, 0x08080808, 0x04040404, 0);
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm512_shuffle_epi8(wide, four);
}

}  // namespace
