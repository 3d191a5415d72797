// The bfloat16 row: two tokens in each lane, multiplied and added at once.
#include "native/simd.h"
#include "sampled.h"

namespace twofour {
namespace {

struct Pairs {
  using Number = uint16_t;
  static constexpr int64_t kPerLane = 2;
  // Of a token and the next, `stride` behind it; 0: of one without a next.
  static TWOFOUR_INLINE Lanes::reg load(const uint16_t* p, int64_t stride, int64_t count) {
    const auto lower = (Lanes::U)Lanes::load(p, count) >> 16;
    return stride == 0 ? (Lanes::reg)lower : (Lanes::reg)(lower | (Lanes::U)Lanes::load(p + stride, count));
  }
  static TWOFOUR_INLINE Lanes::reg fma(Lanes::reg left, const float* right, Lanes::reg sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)_mm512_load_ps(right));
  }
};

}  // namespace

void nm_sddmm_2x4_bf16__avx512_bf16(const NmSddmm& a) { sample<Lanes, Pairs>(a); }

}  // namespace twofour
