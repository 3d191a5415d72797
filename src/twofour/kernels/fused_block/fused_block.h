// A block of fused operators: a program of steps over tiles of a domain, and the kernels that run it.
//
// The domain is the shape of the block's largest result. Every operand is read or written at every place of it, by
// strides: 0 where it is broadcast. The last axis is the one that reductions run over. The border merges axes that
// every operand has without a gap, so that what is contiguous everywhere is one row, and cuts the domain into tiles:
// a piece of a long row, or several short rows.
#pragma once

#include <cstdint>

#include "native/compiler.h"
#include "native/table.h"
#include "native/type.h"

namespace twofour {

enum class StepOp : uint8_t {
#define TWOFOUR_STEP(name, kind) name,
#include "ops.def"
};

constexpr int kRowRegister = 1 << 10;  // from here on registers have one number a row
constexpr int kNumber = -1;            // the second operand is Step::value
constexpr int kOuterAxes = 6;          // besides the row
constexpr int kMostChain = 16;
constexpr int kMostRegisters = 64, kMostOperands = 64;
// Places of a tile, 8 KB of floats: measured; half as many wait longer for sums of rows. Of bfloat16 alone twice as many.
constexpr int64_t kTile = 2048, kMostTile = 2 * kTile;

// to = op(a, b, c). `load`: a is an input, `store`: to is an output.
// `chain` steps from here on each hand their result to the next one; 1: it is by itself. `lasts`: others read it too.
struct Step {
  StepOp op;
  int16_t to, a, b, c;
  float value;
  int16_t chain = 1;
  bool lasts = false;
};

// Steps [begin, end), for each tile of a row, or once for its row registers.
struct Loop {
  int begin, end;
  bool rows;
};

struct BlockOperand {
  char* data;
  Type type;
  int64_t strides[kOuterAxes];  // in numbers
  int64_t inner;                // from place to place of a row
  const int64_t* rows = nullptr;  // of a table which of its rows each row reads: `strides` are theirs then,
  int64_t table_row = 0;          // and this is from row to row of the table
};

struct Block {
  const Step* steps;
  const Loop* loops;
  int loop_count, registers, row_registers;
  const bool* kept;  // of each register: its values are read in a later loop, where the row is longer than a tile
  bool reduces;
  int axes;  // outer ones
  int64_t sizes[kOuterAxes];
  int64_t rows, width;
  int64_t tile_rows, tile_width;  // one of them is 1 or the whole row
  const BlockOperand *inputs, *outputs;
  int input_count;
  bool streams;      // answers are written past the caches
  bool reads_ahead;  // the operands of the next unit are asked for while this one is computed

  // What threads share: groups of whole rows, or tiles where nothing is summed over a row.
  int64_t groups() const { return (rows + tile_rows - 1) / tile_rows; }
  int64_t pieces() const { return (width + tile_width - 1) / tile_width; }
  int64_t units() const { return reduces ? groups() : groups() * pieces(); }
  // Numbers of scratch of one thread.
  int64_t padded(int64_t numbers) const { return (numbers + 31) / 16 * 16; }
  int64_t of_tile() const { return padded(tile_rows * tile_width); }
  int64_t of_register(int i) const { return kept[i] ? padded(tile_rows * width) : of_tile(); }
  // Whether every tile reads the same numbers of an operand.
  bool stays(const BlockOperand& operand) const {
    bool moves = operand.inner != 0 && tile_width != width;
    for (int a = 0; a < axes; a++) moves |= operand.strides[a] != 0;
    return !moves;
  }
  int64_t scratch() const {
    int64_t all = 16 + row_registers * padded(tile_rows);
    for (int i = 0; i < registers; i++) all += of_register(i);
    for (int i = 0; i < input_count; i++) all += stays(inputs[i]) ? of_tile() : 0;
    return all;
  }
};

// Where the block's row number `row` stands on the outer axes.
static TWOFOUR_INLINE void outer_index(const Block& block, int64_t row, int64_t* index) {
  for (int a = block.axes - 1; a >= 0; a--) {
    index[a] = row % block.sizes[a];
    row /= block.sizes[a];
  }
}

// One row of the table: `run` computes units [begin, end) with `scratch` numbers of scratch, which may hold garbage.
using BlockKernel = KernelRow<void(const Block&, float* scratch, int64_t begin, int64_t end)>;

#define TWOFOUR_ROW(symbol, ...) void symbol(const Block& block, float* scratch, int64_t begin, int64_t end);
#include "fused_block.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
