// The row with BFDOT, which multiplies pairs: both products are added with one rounding to odd, denormals are zero, so
// this row and the others differ in the last bits.
#include <arm_neon.h>

#include "kernels/nm_matmul/nm_matmul.h"
#include "native/simd.h"
#include "rows.h"

namespace {

// Groups as pairs: one look-up of words and one BFDOT. Activations are pieces of four bfloat16.
struct PairGroups {
  using V = Lanes;
  static constexpr int64_t piece = 8;
  using Index = uint16x8_t;
  using Weights = bfloat16x8_t;
  using Inputs = uint8x16_t;
  static TWOFOUR_INLINE Index load_index(const char* p) { return vld1q_u16(reinterpret_cast<const uint16_t*>(p)); }
  static TWOFOUR_INLINE Index next(Index i) { return vshrq_n_u16(i, 2); }
  static TWOFOUR_INLINE Weights load_weights(const char* p) {
    return vreinterpretq_bf16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)));
  }
  static TWOFOUR_INLINE Inputs broadcast(const char* p) {
    uint64_t four;
    std::memcpy(&four, p, 8);
    return vreinterpretq_u8_u64(vdupq_n_u64(four));
  }
  // The low two bits of each word choose one of four: bytes 2 i and 2 i + 1 of a table look-up.
  static TWOFOUR_INLINE void add(int group, Inputs x, Index i, Weights w, V::reg& a, V::reg& b) {
    const uint16x8_t bytes = vmlaq_n_u16(vdupq_n_u16(0x0100), vandq_u16(i, vdupq_n_u16(3)), 0x0202);
    V::reg& sum = group % 2 == 0 ? a : b;
    sum = vbfdotq_f32(sum, vreinterpretq_bf16_u8(vqtbl1q_u8(x, vreinterpretq_u8_u16(bytes))), w);
  }
  static TWOFOUR_INLINE void write(char* to, V::reg x) { V::store_upper(reinterpret_cast<uint16_t*>(to), x); }
};

}  // namespace

namespace twofour {

int64_t nm_matmul_2x4_bf16_rows__neon_bf16__workspace(const Matmul& a) { return row_blocks_workspace<PairGroups>(a); }
void nm_matmul_2x4_bf16_rows__neon_bf16(const Matmul& a) { row_blocks<PairGroups, FetchTwice>(a); }

}  // namespace twofour
