// The bf16 row on AMX tiles.
#include "kernels/epilogue_math.h"
#include "kernels/nm_matmul/nm_matmul.h"
#include "kernels/tile_product.h"
#include "native/simd.h"

namespace {

using twofour::Type;

inline __mmask16 lanes(int64_t count) { return static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1); }

struct Bf16 {
  static constexpr int64_t inputs = twofour::kBf16Inputs;
  static constexpr int64_t packed = twofour::kBf16Packed;

  static int64_t call_bytes(const Matmul&) { return 0; }
  static int64_t token_bytes(const Matmul&) { return 0; }
  static PackedStrip<Bf16> strip(const Matmul& a, int64_t strip, int64_t steps) {
    return PackedStrip<Bf16>::of(static_cast<const uint8_t*>(a.weight), strip, steps);
  }

  template <int sum, int x, int w>
  static TWOFOUR_INLINE void dot() {
    TileUnit::dot_bf16<sum, x, w>();
  }

  // A tile. Two of its rows, that is one group of 16 outputs, from 16 pairs of kept values: an even input stands low in
  // its pair, an odd one high; where both are even or both odd, the second stands in the other half and is swapped. 31
  // cycles a tile; vpexpandw would take 50.
  static TWOFOUR_INLINE void expand(const uint8_t* from, uint8_t* to) {
    TWOFOUR_UNROLL
    for (int g = 0; g < 8; g++) {
      const __m512i kept = _mm512_load_si512(from + twofour::kBf16Masks + g * 64);
      const __mmask32 low = _load_mask32(reinterpret_cast<__mmask32*>(const_cast<uint8_t*>(from) + g * 8));
      const __mmask32 high = _load_mask32(reinterpret_cast<__mmask32*>(const_cast<uint8_t*>(from) + g * 8 + 4));
      const __m512i swapped = _mm512_rol_epi32(kept, 16);
      _mm512_store_si512(to + g * 128, _mm512_maskz_mov_epi16(low, kept));
      const __m512i second = _mm512_maskz_mov_epi16(high, kept);
      _mm512_store_si512(to + g * 128 + 64, _mm512_mask_mov_epi16(second, _kand_mask32(low, high), swapped));
    }
  }

  // 32 inputs of a token as bf16, zero from `count` on.
  static TWOFOUR_INLINE __m512i step_of(const float* x, int64_t count) {
    const __m512 low = _mm512_maskz_loadu_ps(lanes(count), x);
    const __m512 high = count > 16 ? _mm512_maskz_loadu_ps(lanes(count - 16), x + 16) : _mm512_setzero_ps();
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
  }
  static TWOFOUR_INLINE __m512i step_of(const uint16_t* x, int64_t count) {
    return _mm512_maskz_loadu_epi16(count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1, x);
  }
  template <class X>
  static TWOFOUR_INLINE void copy(const X* x, int64_t in, int64_t steps, uint8_t* to, int64_t stride) {
    for (int64_t s = 0; s + 1 < steps; s++) _mm512_store_si512(to + s * stride, step_of(x + s * inputs, inputs));
    const int64_t last = (steps - 1) * inputs;
    _mm512_store_si512(to + (steps - 1) * stride, step_of(x + last, in - last));
  }
  static void copy_token(const Matmul& a, int64_t t, int64_t steps, uint8_t* to, int64_t stride, uint8_t*, uint8_t*) {
    if (a.x_type == Type::bf16)
      return copy(static_cast<const uint16_t*>(a.x) + t * a.x_stride, a.in_features, steps, to, stride);
    copy(static_cast<const float*>(a.x) + t * a.x_stride, a.in_features, steps, to, stride);
  }
  static TWOFOUR_INLINE __m512 real(const float* p, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }
  static TWOFOUR_INLINE __m512 real(const uint16_t* p, __mmask16 mask) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static TWOFOUR_INLINE void write(float* p, const __mmask16 (&mask)[2], const __m512 (&v)[2]) {
    _mm512_mask_storeu_ps(p, mask[0], v[0]);
    _mm512_mask_storeu_ps(p + kTileRows, mask[1], v[1]);
  }
  static TWOFOUR_INLINE void write(uint16_t* p, const __mmask16 (&mask)[2], const __m512 (&v)[2]) {
    _mm512_mask_storeu_epi16(p, _mm512_kunpackw(mask[1], mask[0]), (__m512i)_mm512_cvtne2ps_pbh(v[1], v[0]));
  }

  template <Activation activation, class Y>
  static void finish_as(const Matmul& a, const uint8_t* sums, int64_t stride, int64_t token, int64_t tokens,
                        int64_t row) {
    __mmask16 mask[2];
    __m512 bias[2];
    for (int v = 0; v < 2; v++) {
      const int64_t left = a.out_features - row - v * kTileRows;
      mask[v] = lanes(left > 0 ? left : 0);
      bias[v] = a.bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask[v], a.bias + row + v * kTileRows);
    }
    const Combine combine = a.epilogue.combine;
    for (int64_t t = 0; t < tokens; t++) {
      Y* to = static_cast<Y*>(a.y) + (token + t) * a.y_stride + row;
      const Y* other = static_cast<const Y*>(a.epilogue.other) + (token + t) * a.epilogue.other_stride + row;
      __m512 y[2];
      TWOFOUR_UNROLL
      for (int v = 0; v < 2; v++) {
        const __m512 sum = _mm512_load_ps(sums + (v * stride + t) * 64);
        y[v] = activated<activation, Lanes>(_mm512_add_ps(sum, bias[v]));
        if (combine != Combine::none) y[v] = apply_combine<Lanes>(y[v], real(other + v * kTileRows, mask[v]), combine);
      }
      write(to, mask, y);
    }
  }
  // sums is [16 rows][stride tokens][16].
  static void finish(const Matmul& a, const uint8_t* sums, int64_t stride, int64_t token, int64_t tokens, int64_t row,
                     const uint8_t*) {
    with_activation(a.epilogue.activation, [&](auto constant) {
      constexpr Activation activation = decltype(constant)::value;
      if (a.y_type == Type::bf16) finish_as<activation, uint16_t>(a, sums, stride, token, tokens, row);
      else finish_as<activation, float>(a, sums, stride, token, tokens, row);
    });
  }
};

}  // namespace

namespace twofour {

int64_t nm_matmul_2x4_bf16_tiles__amx__workspace(const Matmul& a) { return tile_product_workspace<Bf16>(a); }
void nm_matmul_2x4_bf16_tiles__amx(const Matmul& a) { tile_product<Bf16>(a); }

}  // namespace twofour
