// The int8 row on AMX tiles: activations u8, quantized by the token as int8/README.md says, weights s8.
#include "kernels/nm_matmul/int8/row_octets.h"
#include "kernels/nm_matmul/nm_matmul.h"
#include "kernels/octet_lanes.h"
#include "kernels/tile_product.h"

namespace {

// 64 inputs of a token stand together, the next 64 a step further.
struct TileVec : OctetLanes {
  static TWOFOUR_INLINE void store_x(ints q, uint8_t* to, int64_t k, int64_t stride) {
    _mm_store_si128(reinterpret_cast<__m128i*>(to + k / 64 * stride + k % 64), _mm512_cvtepi32_epi8(q));
  }
};

struct Int8 {
  static constexpr int64_t inputs = twofour::kInt8Inputs;
  static constexpr int64_t packed = twofour::kInt8Packed;

  // The range of every token.
  static int64_t call_bytes(const Matmul& a) {
    return (a.tokens * static_cast<int64_t>(sizeof(Range)) + 63) / 64 * 64;
  }
  static int64_t token_bytes(const Matmul&) { return 0; }
  static PackedStrip<Int8> strip(const Matmul& a, int64_t strip, int64_t steps) {
    const auto* weights = static_cast<const uint8_t*>(a.weight) + twofour::int8_head_bytes(a.out_features);
    return PackedStrip<Int8>::of(weights, strip, steps);
  }

  template <int sum, int x, int w>
  static TWOFOUR_INLINE void dot() {
    TileUnit::dot_us<sum, x, w>();
  }

  // A row of a tile is one group of four inputs of 16 outputs and has 32 kept values. 47 cycles a tile.
  static TWOFOUR_INLINE void expand(const uint8_t* from, uint8_t* to) {
    TWOFOUR_UNROLL
    for (int g = 0; g < 16; g++) {
      const __mmask64 kept = _load_mask64(reinterpret_cast<__mmask64*>(const_cast<uint8_t*>(from) + g * 8));
      // From a register: the mask of a damaged weight would have expandload read past the tile.
      const auto* values = reinterpret_cast<const __m256i*>(from + twofour::kInt8Masks + g * 32);
      _mm512_store_si512(to + g * 64, _mm512_maskz_expand_epi8(kept, _mm512_zextsi256_si512(_mm256_loadu_si256(values))));
    }
  }

  static void copy_token(const Matmul& a, int64_t t, int64_t, uint8_t* to, int64_t stride, uint8_t* call, uint8_t*) {
    Range range{1.0f, 0};
    if (a.x_type == Type::f32) {
      range = real_token<TileVec>(a, static_cast<const float*>(a.x) + t * a.x_stride, to, stride);
    } else if (a.x_type == Type::bf16) {
      range = real_token<TileVec>(a, static_cast<const uint16_t*>(a.x) + t * a.x_stride, to, stride);
    } else {
      static_range(a, &range);
      const uint8_t* from = static_cast<const uint8_t*>(a.x) + t * a.x_stride;
      for (int64_t k = 0; k < a.in_features; k += inputs) {
        const int64_t left = a.in_features - k;
        const __mmask64 mask = left >= 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
        _mm512_store_si512(to + k / 64 * stride, _mm512_maskz_loadu_epi8(mask, from + k));
      }
    }
    reinterpret_cast<Range*>(call)[t] = range;
  }

  static void finish(const Matmul& a, const uint8_t* sums, int64_t stride, int64_t token, int64_t tokens, int64_t row,
                     const uint8_t* call) {
    finish_sums<OctetLanes>(a, octet_head(a), reinterpret_cast<const int32_t*>(sums), 2, stride,
                     reinterpret_cast<const Range*>(call), token, tokens, row, a.out_features);
  }
};

}  // namespace

namespace twofour {

int64_t nm_matmul_2x4_int8_tiles__amx__workspace(const Matmul& a) { return tile_product_workspace<Int8>(a); }
void nm_matmul_2x4_int8_tiles__amx(const Matmul& a) { tile_product<Int8>(a); }

}  // namespace twofour
