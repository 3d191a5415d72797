// The row of bytes on AMX tiles: 16 tokens times 16 outputs and 64 inputs are one instruction.
#include "bits_matmul.h"
#include "kernels/tile_product.h"
#include "tokens.h"

namespace {

using twofour::kBytesPanel;

constexpr int64_t kFourBytes = kBytesPanel * 4;  // four inputs of a panel
// Lines are fetched so many steps of 64 inputs ahead into L2 and into L1: twelve and two of a tile of 16 fours.
constexpr int64_t kStepsFar = 12, kStepsNear = 2;

// Half a panel: the lines of its tiles stand in the layout as they are, a line every four inputs.
struct BytesStrip {
  const uint8_t* at;
  int64_t fours;

  TWOFOUR_INLINE void expand(int64_t step, uint8_t* to) const {
    const int64_t first = step * kTileRows;
    const uint8_t* from = at + first * kFourBytes;
    if (first + kTileRows > fours) return last(from, fours - first, to);
    TWOFOUR_UNROLL
    for (int r = 0; r < kTileRows; r++) copy(from + r * kFourBytes, to + r * 64);
  }
  static TWOFOUR_INLINE void copy(const uint8_t* from, uint8_t* to) {
    constexpr int64_t step = kTileRows * kFourBytes;
    TWOFOUR_UNROLL
    for (int tile = 0; tile < 2; tile++) {
      _mm_prefetch(reinterpret_cast<const char*>(from) + kStepsFar * step + tile * 64, _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(from) + kStepsNear * step + tile * 64, _MM_HINT_T0);
      _mm512_store_si512(to + tile * kTileBytes, _mm512_loadu_si512(from + tile * 64));
    }
  }
  // Of a step whose inputs end: lines behind them are zero, as the tokens are.
  static void last(const uint8_t* from, int64_t left, uint8_t* to) {
    for (int64_t r = 0; r < kTileRows; r++)
      for (int64_t tile = 0; tile < 2; tile++)
        _mm512_store_si512(to + tile * kTileBytes + r * 64,
                           r < left ? _mm512_loadu_si512(from + r * kFourBytes + tile * 64) : _mm512_setzero_si512());
  }
};

struct BitsBytes {
  static constexpr int64_t inputs = 64;

  static int64_t call_bytes(const Matmul& a) { return TokenFacts::bytes(a.tokens); }
  static int64_t token_bytes(const Matmul& a) { return padded_inputs(a.in_features); }
  static BitsWeight weight(const Matmul& a) {
    return BitsWeight(*twofour::bits_layout("bits_bytes"), a.weight, a.out_features, a.in_features);
  }
  static BytesStrip strip(const Matmul& a, int64_t strip, int64_t) {
    const auto* panel = reinterpret_cast<const uint8_t*>(weight(a).panel(strip / 2));
    return {panel + strip % 2 * kStripRows * 4, ceil_div(a.in_features, 4)};
  }

  template <int sum, int x, int w>
  static TWOFOUR_INLINE void dot() {
    TileUnit::dot_us<sum, x, w>();
  }

  // `own` has the codes in a row, then 64 of them go to each step.
  static void copy_token(const Matmul& a, int64_t t, int64_t steps, uint8_t* to, int64_t stride, uint8_t* call,
                         uint8_t* own) {
    token_codes<WholeLanes>(a, t, own, padded_inputs(a.in_features), TokenFacts(call, a.tokens));
    for (int64_t s = 0; s < steps; s++) _mm512_store_si512(to + s * stride, _mm512_load_si512(own + s * inputs));
  }

  static void finish(const Matmul& a, const uint8_t* sums, int64_t stride, int64_t token, int64_t tokens, int64_t row,
                     const uint8_t* call) {
    const TokenFacts facts(const_cast<uint8_t*>(call), a.tokens);
    finish_codes<WholeLanes>(a, weight(a), reinterpret_cast<const int32_t*>(sums), 2, stride, facts, token, tokens, row);
  }
};

}  // namespace

namespace twofour {

int64_t bits_matmul_bytes__amx__workspace(const Matmul& a) { return tile_product_workspace<BitsBytes>(a); }
void bits_matmul_bytes__amx(const Matmul& a) { tile_product<BitsBytes>(a); }

}  // namespace twofour
