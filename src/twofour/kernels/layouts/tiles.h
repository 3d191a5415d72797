// The packed layouts "bf16_tiles" and "int8_tiles" of a 2:4 weight, (../nm_matmul/amx/README.md): their sizes.
#pragma once

#include <cstdint>

namespace twofour {

// Strips of 2 x 16 output rows; in a strip one step per 32 (bf16) or 64 (int8) inputs; in a step two tiles of 16 rows.
// A tile stands for 1024 bytes of dense weight in the order the tile unit wants, [4 bytes of inputs][output row][4
// bytes]: a bit per element says what is kept, the kept values follow.
constexpr int64_t kTileRows = 16;
constexpr int64_t kStripRows = 2 * kTileRows;
constexpr int64_t kTileBytes = 1024;  // expanded

constexpr int64_t kBf16Inputs = 32;
constexpr int64_t kBf16Masks = kTileRows * 4;
constexpr int64_t kBf16Packed = kBf16Masks + kTileBytes / 2;

constexpr int64_t kInt8Inputs = 64;
constexpr int64_t kInt8Masks = kTileRows * 8;
constexpr int64_t kInt8Packed = kInt8Masks + kTileBytes / 2;

}  // namespace twofour
