// The portable rows: 128-bit vectors as GCC and clang write them, lowered to SSE2, NEON or plain scalar code.
#include <cstring>

#include "row_blocks.h"
#include "row_pairs.h"
#include "token_panels.h"

namespace {

struct Vec {
  typedef float reg __attribute__((vector_size(16)));
  typedef uint32_t ireg __attribute__((vector_size(16)));
  static constexpr int width = 4;
  static constexpr int panel_sums = 4;
  static constexpr int row_halves = 1, row_tokens = 4, row_sums = 4;

  static reg zero() { return reg{0, 0, 0, 0}; }
  static reg load(const float* p) { return load_unaligned(p); }
  static reg load_shared(const float* p) { return load_unaligned(p); }
  static reg load_unaligned(const float* p) {
    reg v;
    std::memcpy(&v, p, 16);
    return v;
  }
  static reg load_partial(const float* p, int64_t count) {
    reg v = zero();
    for (int64_t i = 0; i < count; i++) v[i] = p[i];
    return v;
  }
  static void store(float* p, reg v) { std::memcpy(p, &v, 16); }
  static void store_unaligned(float* p, reg v) { std::memcpy(p, &v, 16); }
  static void store_partial(float* p, reg v, int64_t count) {
    for (int64_t i = 0; i < count; i++) p[i] = v[i];
  }
  static reg broadcast(const float* p) { return reg{*p, *p, *p, *p}; }
  static reg broadcast4(const float* p) { return load_unaligned(p); }
  static reg add(reg a, reg b) { return a + b; }
  static reg fma(reg w, const float* x, reg sum) { return sum + w * load(x); }
  static reg fma(reg w, reg x, reg sum) { return sum + w * x; }
  static void prefetch(const float*, int64_t, int64_t) {}

  static ireg load_index(const char* p) {
    ireg v;
    std::memcpy(&v, p, 16);
    return v;
  }
  template <int bits>
  static ireg shift_right(ireg v) {
    return v >> bits;
  }
  static reg permute4(reg x, ireg i) { return reg{x[i[0] & 3], x[i[1] & 3], x[i[2] & 3], x[i[3] & 3]}; }

  static void transpose(reg (&t)[4]) {
    const reg a = t[0], b = t[1], c = t[2], d = t[3];
    for (int i = 0; i < 4; i++) t[i] = reg{a[i], b[i], c[i], d[i]};
  }
};

}  // namespace

namespace twofour {

#define TWOFOUR_PANEL_ROW(symbol, Weights, Wide, Group)                                                             \
  int64_t symbol##__workspace(const NmMatmul& a) { return panel_product_workspace<Vec, Wide, Group>(a); }           \
  void symbol(const NmMatmul& a) { panel_product<Vec, Weights, Wide, Group>(a); }
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_panels__scalar, BlockWeights, 4, 1)
TWOFOUR_PANEL_ROW(nm_matmul_2x4_f32_pairs__scalar, PairWeights, 4, 1)
#undef TWOFOUR_PANEL_ROW

int64_t nm_matmul_2x4_f32_rows__scalar__workspace(const NmMatmul& a) { return row_blocks_workspace<Vec>(a); }
void nm_matmul_2x4_f32_rows__scalar(const NmMatmul& a) { row_blocks<Vec>(a); }

}  // namespace twofour
