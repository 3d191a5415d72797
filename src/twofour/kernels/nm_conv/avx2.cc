// The AVX2 + FMA row.
#include <immintrin.h>

#include "conv_blocks.h"

namespace {

struct Vec {
  using reg = __m256;
  static constexpr int width = 8;

  static __m256i mask(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static reg zero() { return _mm256_setzero_ps(); }
  static reg load(const float* p) { return _mm256_load_ps(p); }
  // A load that stays one: without the barrier gcc folds it into each multiply-add that uses it, loading twice.
  static reg load_shared(const float* p) {
    reg v = load(p);
    asm("" : "+x"(v));
    return v;
  }
  static reg load_unaligned(const float* p) { return _mm256_loadu_ps(p); }
  static reg load_partial(const float* p, int64_t count) { return _mm256_maskload_ps(p, mask(count)); }
  static void store(float* p, reg v) { _mm256_store_ps(p, v); }
  static void store_unaligned(float* p, reg v) { _mm256_storeu_ps(p, v); }
  static void store_partial(float* p, reg v, int64_t count) { _mm256_maskstore_ps(p, mask(count), v); }
  static reg broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  // A NaN stays one: the second operand wins.
  static reg relu(reg v) { return _mm256_max_ps(zero(), v); }
  static reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
  static reg fma(reg w, const float* x, reg sum) { return _mm256_fmadd_ps(w, _mm256_load_ps(x), sum); }
  static reg fma(reg w, reg x, reg sum) { return _mm256_fmadd_ps(w, x, sum); }
  static void transpose(reg (&t)[8]) {
    reg s[8];
    TWOFOUR_UNROLL
    for (int i = 0; i < 8; i += 4) {
      const reg a = _mm256_unpacklo_ps(t[i], t[i + 1]), b = _mm256_unpackhi_ps(t[i], t[i + 1]);
      const reg c = _mm256_unpacklo_ps(t[i + 2], t[i + 3]), d = _mm256_unpackhi_ps(t[i + 2], t[i + 3]);
      s[i] = _mm256_shuffle_ps(a, c, 0x44);
      s[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
      s[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
      s[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
    TWOFOUR_UNROLL
    for (int i = 0; i < 4; i++) {
      t[i] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x20);
      t[i + 4] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x31);
    }
  }
};

}  // namespace

namespace twofour {

int64_t nm_conv_2x4_f32_blocks__avx2__workspace(const NmConv& a) { return conv_blocks_workspace<Vec, 4>(a); }
void nm_conv_2x4_f32_blocks__avx2(const NmConv& a) { conv_blocks<Vec, 4>(a); }

}  // namespace twofour
