// The gates of LSTM, GRU and RNN in vectors: one pass over what the two products of a step answered. Internal linkage.
//
// Equations: torch.nn.LSTM, torch.nn.GRU (the recurrent bias of `n` is inside the product with r) and torch.nn.RNN.
#pragma once

#include <cstdint>

#include "kernels/precise_math.h"
#include "native/compiler.h"
#include "recurrent.h"

namespace {

using twofour::Cell;
using twofour::Gates;

template <class V, Cell kind>
TWOFOUR_INLINE typename V::reg next_state(const float* x, const float* h, int64_t hidden, float* cell, const float* state,
                                          int64_t left) {
  using M = PreciseMath<V>;
  const auto gate = [&](int64_t i) { return V::load(x + i * hidden, left) + V::load(h + i * hidden, left); };
  if constexpr (kind == Cell::lstm) {
    const auto kept = M::sigmoid(gate(1)) * V::load(cell, left);
    const auto c = kept + M::sigmoid(gate(0)) * M::tanh(gate(2));
    V::store(cell, c, left);
    return M::sigmoid(gate(3)) * M::tanh(c);
  } else if constexpr (kind == Cell::gru) {
    const auto r = M::sigmoid(gate(0)), z = M::sigmoid(gate(1));
    const auto n = M::tanh(V::load(x + 2 * hidden, left) + r * V::load(h + 2 * hidden, left));
    return (V::load(state, left) - n) * z + n;
  } else if constexpr (kind == Cell::tanh) {
    return M::tanh(gate(0));
  } else {
    return M::relu(gate(0));
  }
}

template <class V, Cell kind>
TWOFOUR_NOINLINE void gates_of_rows(const Gates& a) {
  const int64_t width = gates_of(kind) * a.hidden;
  for (int64_t r = 0; r < a.rows; r++) {
    const float *x = a.from_input + r * width, *h = a.from_state + r * width;
    float* cell = a.cell == nullptr ? nullptr : a.cell + r * a.hidden;
    float* state = a.state + r * a.hidden;
    float* answer = a.answer == nullptr ? nullptr : a.answer + r * a.answer_stride;
    for (int64_t i = 0; i < a.hidden; i += V::width) {
      const int64_t left = a.hidden - i;
      float* c = kind == Cell::lstm ? cell + i : nullptr;
      const auto y = next_state<V, kind>(x + i, h + i, a.hidden, c, state + i, left);
      V::store(state + i, y, left);
      if (answer != nullptr) V::store(answer + i, y, left);
    }
  }
}

template <class V>
void run_gates(Cell cell, const Gates& step) {
  switch (cell) {
    case Cell::lstm: return gates_of_rows<V, Cell::lstm>(step);
    case Cell::gru: return gates_of_rows<V, Cell::gru>(step);
    case Cell::tanh: return gates_of_rows<V, Cell::tanh>(step);
    case Cell::relu: return gates_of_rows<V, Cell::relu>(step);
  }
}

}  // namespace
