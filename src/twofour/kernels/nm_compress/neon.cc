#include "codes.h"
#include "nm_compress.h"
#include "patterns/keep_neon.h"

namespace twofour {
namespace {

// Two kept values of a group move to the front: byte look-ups by the group's keep bits (two of four are set).
struct Fronts {
  uint8_t of[16][8] = {};
  constexpr Fronts() {
    for (int bits = 0; bits < 16; ++bits)
      for (int i = 0, to = 0; i < 4; ++i)
        if (bits >> i & 1 && to < 8)
          for (int byte = 0; byte < 4; ++byte) of[bits][to++] = static_cast<uint8_t>(4 * i + byte);
  }
};
constexpr Fronts kFronts;

// One group: writes its two values, adds to `dropped`, returns its keep bits.
inline uint32_t compress_group(const float* w, float* values, int64_t* dropped) {
  const uint32x4_t bits = vreinterpretq_u32_f32(vld1q_f32(w));
  const int32x4_t key = vreinterpretq_s32_u32(vandq_u32(bits, vdupq_n_u32(0x7fffffff)));
  const uint32x4_t keep = keep_two_of_four(key);
  const uint32_t kept = bits_of(keep);
  vst1_u8(reinterpret_cast<uint8_t*>(values), vqtbl1_u8(vreinterpretq_u8_u32(bits), vld1_u8(kFronts.of[kept])));
  *dropped += vaddvq_u32(vshrq_n_u32(vbicq_u32(vtstq_s32(key, key), keep), 31));
  return kept;
}

inline int64_t compress_row(const float* w, int64_t columns, float* values, uint8_t* indices) {
  int64_t dropped = 0, i = 0;
  for (; i + 8 <= columns; i += 8) {
    const uint32_t low = compress_group(w + i, values + i / 2, &dropped);
    indices[i / 8] = kCodes.of[low | compress_group(w + i + 4, values + i / 2 + 2, &dropped) << 4];
  }
  if (i < columns) indices[i / 8] = kCodes.of[compress_group(w + i, values + i / 2, &dropped)];
  return dropped;
}

}  // namespace

int64_t nm_compress_2x4_f32__neon(const NmCompress& a) { return compress_rows(a, compress_row); }

}  // namespace twofour
