// The packed layout "int4_rows" (../nm_matmul/int4/README.md): units of 32 output rows, and where their parts stand.
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

// The layout "int4_dense" (../dense_matmul/int4/README.md): its size, a multiple of 64, and packing from rows of two int4
// a byte, low first, in -8..7; scales and zeros (or null): out x ceil(in / group) floats.
int64_t int4_dense_layout__bytes(int64_t out, int64_t in, int64_t group, bool zeros);
void int4_dense_layout__pack(const uint8_t* values, const float* scales, const float* zeros, int64_t out, int64_t in,
                             int64_t group, void* packed);

constexpr int kInt4Offset = 8;  // half a byte holds q + 8 of a value q in -8..7; so do zero points

}  // namespace twofour

namespace {

inline uint16_t to_stored_scale(float value) {  // a bfloat16, exact for the scales that pack writes
  return static_cast<uint16_t>((__builtin_bit_cast(uint32_t, value) + 0x8000u) >> 16);
}
inline float from_stored_scale(uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
}

// Where value i of a row's block stands among the lines of its half: a line holds eight values of each of 16 rows, the
// first four in the low halves of a dword's bytes.
struct Int4Place {
  int64_t byte;
  int shift;
  Int4Place(int64_t lane, int64_t i) : byte(i / 8 * 64 + lane * 4 + i % 4), shift(i / 4 % 2 * 4) {}

  void write(uint8_t* lines, int value) const {
    lines[byte] = static_cast<uint8_t>(lines[byte] | value << shift);
  }
  int read(const uint8_t* lines) const { return lines[byte] >> shift & 15; }
};

// Half byte i of a canonical row.
inline int half_byte(const uint8_t* row, int64_t i) { return row[i / 2] >> (i % 2 * 4) & 15; }

}  // namespace
