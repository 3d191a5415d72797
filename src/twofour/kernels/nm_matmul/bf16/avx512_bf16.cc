// The AVX512-BF16 rows: vdpbf16ps multiplies pairs. It adds both products with round to nearest and takes denormals for
// zero, so these rows and the others differ in the last bits.
#include "kernels/nm_matmul/nm_matmul.h"
#include "pair_panels.h"
#include "rows.h"

namespace {

TWOFOUR_INLINE __m512 dot(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

// Groups as pairs: one permute of words and one vdpbf16ps. Activations are pieces of four bfloat16.
struct PairGroups {
  using V = Lanes;
  static constexpr int64_t piece = 8;
  using Index = __m512i;
  using Weights = __m512i;
  using Inputs = __m512i;

  static TWOFOUR_INLINE Index load_index(const char* p) { return _mm512_load_si512(p); }
  static TWOFOUR_INLINE Index next(Index i) { return _mm512_srli_epi16(i, 2); }
  static TWOFOUR_INLINE Weights load_weights(const char* p) { return _mm512_load_si512(p); }
  static TWOFOUR_INLINE Inputs broadcast(const char* p) {
    return _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  // x repeats every four words, so the three index bits above the low two may be anything.
  static TWOFOUR_INLINE void add(int group, Inputs x, Index i, Weights w, __m512& a, __m512& b) {
    __m512& sum = group % 2 == 0 ? a : b;
    sum = dot(sum, _mm512_permutexvar_epi16(i, x), w);
  }
  static TWOFOUR_INLINE void write(char* to, __m512 x) { V::store_upper(reinterpret_cast<uint16_t*>(to), x); }
};

}  // namespace

namespace twofour {

#define TWOFOUR_ROWS(name, Fetch)                                                             \
  int64_t name##__workspace(const Matmul& a) { return row_blocks_workspace<PairGroups>(a); } \
  void name(const Matmul& a) { row_blocks<PairGroups, Fetch>(a); }
TWOFOUR_ROWS(nm_matmul_2x4_bf16_rows__avx512_bf16, FetchTwice)
TWOFOUR_ROWS(nm_matmul_2x4_bf16_rows_near__avx512_bf16, FetchOnce)
TWOFOUR_ROWS(nm_matmul_2x4_bf16_rows_stream__avx512_bf16, FetchNone)
#undef TWOFOUR_ROWS

int64_t nm_matmul_2x4_bf16_panels__avx512_bf16__workspace(const Matmul& a) {
  return pair_product_workspace(a);
}
void nm_matmul_2x4_bf16_panels__avx512_bf16(const Matmul& a) { pair_product(a); }

}  // namespace twofour
