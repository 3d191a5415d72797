// The portable rows: 128-bit vectors as GCC and clang write them, lowered to SSE2, NEON or plain scalar code.
#include "native/lanes_portable.h"
#include "panels.h"
#include "rows.h"

namespace {

struct Vec : Lanes {
  static constexpr int panel_sums = 4;
  static constexpr int row_halves = 1, row_tokens = 4, row_sums = 4;

  // bfloat16 in memory as the upper halves of floats, and back.
  static reg load_upper(const char* p) { return load_upper_partial(p, 4); }
  static reg load_upper_partial(const char* p, int64_t count) {
    uint16_t words[4] = {};
    std::memcpy(words, p, static_cast<size_t>(2 * count));
    return (reg)(ireg{words[0], words[1], words[2], words[3]} << 16);
  }
  static void store_upper(char* p, reg v) { store_upper_partial(p, v, 4); }
  static void store_upper_partial(char* p, reg v, int64_t count) {
    const ireg bits = (ireg)v >> 16;
    for (int64_t i = 0; i < count; i++) {
      const uint16_t word = static_cast<uint16_t>(bits[i]);
      std::memcpy(p + 2 * i, &word, 2);
    }
  }

  // Dwords that hold two bfloat16 each, as two vectors of floats.
  static reg lower(ireg v) { return (reg)(v << 16); }
  static reg upper(ireg v) { return (reg)(v & 0xffff0000u); }
  static TWOFOUR_INLINE void broadcast_pair(const char* p, reg (&w)[2]) {
    uint32_t both;
    std::memcpy(&both, p, 4);
    w[0] = lower(ireg{both, both, both, both});
    w[1] = upper(ireg{both, both, both, both});
  }
};

}  // namespace

namespace twofour {

int64_t nm_matmul_2x4_bf16_rows__scalar__workspace(const NmMatmul& a) {
  return row_blocks_workspace<FloatGroups<Vec>>(a);
}
void nm_matmul_2x4_bf16_rows__scalar(const NmMatmul& a) { row_blocks<FloatGroups<Vec>, FetchTwice>(a); }

int64_t nm_matmul_2x4_bf16_panels__scalar__workspace(const NmMatmul& a) {
  return panel_product_workspace<FloatPanel<Vec>, 4, 1>(a);
}
void nm_matmul_2x4_bf16_panels__scalar(const NmMatmul& a) { panel_product<FloatPanel<Vec>, 4, 1>(a); }

}  // namespace twofour
