// The packed layout of a 2:4 int4 weight, drawn in README.md: units of 32 output rows, and where their parts stand.
// The dense int4 weight of kernels/dense_matmul/int4 has the same units with another block.
#pragma once

#include <cstdint>

namespace twofour {

constexpr int64_t kInt4Rows = 32;                               // output rows of a unit, in two halves
constexpr int64_t kInt4Half = 16;                               // rows of a half: one dword lane each
constexpr int64_t kInt4Tile = 32;                               // inputs of a block
constexpr int64_t kInt4HalfBytes = 64 + 128;                    // 16 dwords of codes, 16 x 16 values of half a byte
constexpr int64_t kInt4BlockBytes = 2 * kInt4HalfBytes;         // 2:4
constexpr int64_t kInt4DenseHalfBytes = kInt4Half * kInt4Tile / 2;
constexpr int64_t kInt4DenseBlockBytes = 2 * kInt4DenseHalfBytes;

// A unit: 32 floats (2:4: the sum of each row, else unused), bfloat16 scales [group][row], zero points [group][row] as
// bytes 0..15 where the weight has any, then one block per 32 inputs. Offsets in bytes.
struct Int4Unit {
  int64_t tiles, groups, group_tiles;
  int64_t scales, zeros, blocks, bytes;

  Int4Unit(int64_t in, int64_t group, bool has_zeros, int64_t block_bytes) {
    const int64_t inputs = group > 0 ? group : kInt4Tile;
    tiles = (in + kInt4Tile - 1) / kInt4Tile;
    groups = (in + inputs - 1) / inputs;
    group_tiles = (inputs + kInt4Tile - 1) / kInt4Tile;
    scales = kInt4Rows * 4;
    zeros = scales + groups * kInt4Rows * 2;
    blocks = (zeros + (has_zeros ? groups * kInt4Rows : 0) + 63) / 64 * 64;
    bytes = blocks + tiles * block_bytes;
  }
};

constexpr int kInt4Offset = 8;  // half a byte holds q + 8 of a value q in -8..7; so do zero points

}  // namespace twofour
