// The gates of one step of a recurrent layer: the table of kernels, and what they are called with.
#pragma once

#include <cstdint>

#include "native/table.h"

namespace twofour {

// The order of `CELLS` in reference.py.
enum class Cell : int { lstm, gru, tanh, relu };

// Gates of a cell, stacked in the order of torch's weights: i f g o, r z n, one.
constexpr int64_t gates_of(Cell cell) { return cell == Cell::lstm ? 4 : cell == Cell::gru ? 3 : 1; }

// One step of `rows` sequences. Strides are in floats. `from_state` and `state` may not overlap.
struct Gates {
  const float* from_input;  // (rows, gates * hidden): the product of the inputs, with its bias
  const float* from_state;  // (rows, gates * hidden), contiguous: the product of the states, with its bias
  float* cell;              // (rows, hidden), contiguous: c, read and written; of an LSTM alone
  float* state;             // (rows, hidden), contiguous: h, written; a GRU reads the one before
  float* answer;            // (rows, hidden), `answer_stride` apart: h once more; may be null
  int64_t answer_stride;
  int64_t rows, hidden;
};

struct RecurrentKernel : RowBase {
  void (*run)(Cell cell, const Gates& step);
};

#define TWOFOUR_ROW(symbol, ...) void symbol(Cell cell, const Gates& step);
#include "recurrent.inc"
#undef TWOFOUR_ROW

}  // namespace twofour
