// The row of bytes on AMX tiles: windows are copied together, some of a chunk at a time; 16 of them, 16 outputs and 64 codes
// are one instruction. Tiles of weights stand in the layout as they are.
#include "conv.h"
#include "kernels/tile_product.h"

namespace {

struct ByteConvTiles : ByteTiles<ByteDots> {
  using ByteTiles<ByteDots>::ByteTiles;

  // Bytes from one window to the next: whole lines, so that no row of a tile lies in two.
  static int64_t window(const ConvPlan& plan) { return round_up(gathered_bytes(plan), 64); }
  static int64_t windows(const ConvPlan& plan) { return kChunkPixels * window(plan); }  // of the widest row too
  static int64_t scratch(const BitsConv&, const ConvPlan& plan) { return windows(plan) + kStepBytes; }
};
static_assert(kChunkPixels % kPairTokens == 0);

// Sums of two tiles of windows and half a panel of outputs: [vector][32 windows][16]. `last`: room for a step whose codes end
// within a tile, behind which its lines are zero.
void window_pair(const uint8_t* x, int64_t stride, const uint8_t* w, int64_t fours, uint8_t* last, int32_t* sums) {
  constexpr int64_t four = kBytesPanel * 4;
  const auto add = [&](const uint8_t* from, int64_t line, int64_t apart, const uint8_t* codes) TWOFOUR_INLINED {
    TileUnit::load<4>(codes, stride);
    TileUnit::load<6>(from, line);
    TileUnit::dot_us<0, 4, 6>();
    TileUnit::load<7>(from + apart, line);
    TileUnit::dot_us<1, 4, 7>();
    TileUnit::load<5>(codes + kTileRows * stride, stride);
    TileUnit::dot_us<2, 5, 6>();
    TileUnit::dot_us<3, 5, 7>();
  };
  Sums<2>::zero();
  int64_t b = 0;
  for (; b + kTileRows <= fours; b += kTileRows) add(w + b * four, four, 64, x + b * 4);
  if (b < fours) {
    std::memset(last, 0, static_cast<size_t>(kStepBytes));
    for (int64_t r = 0; r < fours - b; r++)
      for (int64_t tile = 0; tile < 2; tile++) std::memcpy(last + tile * kTileBytes + r * 64, w + (b + r) * four + tile * 64, 64);
    add(last, 64, kTileBytes, x + b * 4);
  }
  Sums<2>::store(reinterpret_cast<uint8_t*>(sums), kTileBytes);
}

// Answers of a panel for the windows that stand together, the first of them that of pixel `first` of the chunk.
void panel_answers(const BitsConv& a, const BitsWeight& w, const ByteConvTiles& tiles, const ConvFinish<WholeLanes>& finish,
                   const uint8_t* windows, int64_t stride, int64_t first, int64_t count, int64_t p, uint8_t* last) {
  alignas(64) int32_t sums[4 * kPairTokens * WholeLanes::width];
  const auto* weights = reinterpret_cast<const uint8_t*>(w.panel(p));
  const bool both = a.out_channels - p * kBytesPanel > kStripRows;
  for (int64_t t = 0; t < count; t += kPairTokens) {
    const uint8_t* x = windows + t * stride;
    const int64_t some = least(kPairTokens, count - t);
    window_pair(x, stride, weights, tiles.blocks, last, sums);
    if (both) window_pair(x, stride, weights + kStripRows * 4, tiles.blocks, last, sums + 2 * kPairTokens * WholeLanes::width);
    if (both) finish.tile<4>(sums, kPairTokens, some, first + t, p * kBytesPanel);
    else finish.tile<2>(sums, kPairTokens, some, first + t, p * kBytesPanel);
  }
}

void conv_chunk(const BitsConv& a, const ConvPlan& plan, const BitsWeight& w, const ByteConvTiles& tiles, const Chunk& chunk,
                char* scratch) {
  const int64_t stride = ByteConvTiles::window(plan);
  const auto* windows = reinterpret_cast<const uint8_t*>(scratch);
  auto* last = reinterpret_cast<uint8_t*>(scratch) + ByteConvTiles::windows(plan);
  const ConvFinish<WholeLanes> finish{a, plan, w, chunk};
  if (chunk.codes != nullptr && plan.codes != a.out_channels) std::memset(chunk.codes, 0, static_cast<size_t>(chunk.count * plan.codes));
  const TileUnit unit(pair_shapes(kTileRows));
  for (int64_t first = 0; first < chunk.count; first += kChunkPixels) {
    const int64_t count = least(kChunkPixels, chunk.count - first);
    gather_windows(a, plan, chunk.pixels + first, count, stride, scratch);
    for (int64_t p = 0; p < w.panels; p++) panel_answers(a, w, tiles, finish, windows, stride, first, count, p, last);
  }
  if (chunk.codes != nullptr) finish.emit();
}

}  // namespace

namespace twofour {

int64_t bits_conv_bytes__amx__workspace(const BitsConv& a) { return conv_workspace<ByteConvTiles>(a); }
void bits_conv_bytes__amx(const BitsConv& a) { conv_images<ByteConvTiles>(a); }

}  // namespace twofour
