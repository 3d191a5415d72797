// Recurrent layers for Python: the table of gates, and one call for all steps of a direction.
#include <cstring>
#include <optional>

#include "kernels/products.h"
#include "native/binding.h"
#include "native/scratch.h"
#include "recurrent.h"
#include "sequence.h"

namespace twofour {
namespace {

constexpr RecurrentKernel kRecurrentKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "recurrent", __VA_ARGS__}, symbol},
#include "recurrent.inc"
#undef TWOFOUR_ROW
};

// Sequences of each step, whose rows are those of the input, or null where all steps have the whole batch.
const int64_t* sizes_of(const Border& border, const Operand& sizes, const Rows& x, int64_t batch, int64_t* steps) {
  if (!sizes.given()) {
    *steps = batch == 0 ? 0 : x.rows / batch;
    return nullptr;
  }
  const View view = border.dense(sizes, "sizes", {Type::s64});
  const auto* found = reinterpret_cast<const int64_t*>(view.data);
  *steps = view.count();
  int64_t left = x.rows, most = batch;
  bool fits = view.ndim == 1 && *steps > 0 && found[0] == batch;
  for (int64_t step = 0; fits && step < *steps; step++) {
    fits = found[step] > 0 && found[step] <= most && found[step] <= left;
    most = found[step];
    left -= found[step];
  }
  border.require(fits && left == 0, sizes, "sizes", "falling sizes from the batch's on, as many in all as rows of the input");
  return found;
}

// What all directions of a stack have before the first step, or after the last: (ways, batch, width), contiguous. A call is
// handed all of it, and the place of its own.
struct States {
  int64_t ways, batch, width, bytes;  // `bytes` of a direction
  char* data;

  States(const Border& border, const Operand& operand, const char* role) {
    const View view = border.dense(operand, role, {Type::f32});
    border.require(view.ndim == 3 && view.shape[2] > 0, operand, role, "(layers * directions, batch, width)");
    ways = view.shape[0], batch = view.shape[1], width = view.shape[2];
    bytes = batch * width * 4, data = view.data;
  }
  float* at(int64_t place) const { return reinterpret_cast<float*>(data + place * bytes); }

  // The given states of one direction, or zeros.
  void begin(const Border& border, const Operand& from, const char* role, int64_t place) const {
    const auto size = static_cast<size_t>(bytes);
    if (!from.given()) {
      if (size != 0) std::memset(at(place), 0, size);
      return;
    }
    const View given = border.dense(from, role, {Type::f32});
    if (given.ndim != 3 || given.shape[0] != ways || given.shape[1] != batch || given.shape[2] != width)
      border.refuse(from, role, "torch.float32 (" + std::to_string(ways) + ", " + std::to_string(batch) + ", " +
                                    std::to_string(width) + ") on cpu");
    if (size != 0) std::memmove(at(place), given.data + place * bytes, size);
  }
};

// Runs a sequence whose operands have passed the border, in scratch memory.
void run_sequence(const Border& border, const Sequence& sequence) {
  static Scratch scratch;
  if (sequence.tokens == 0) return;
  bool damaged;
  {
    const Unlocked unlocked;
    const Scratch::Lease lease(scratch, static_cast<size_t>(sequence.bytes()));
    damaged = SequenceRun(sequence, lease.data()).run();
  }
  if (damaged) border.damaged();
}

}  // namespace

void bind_recurrent(nb::module_& m) {
  bind_table(m, kRecurrentKernels);
  m.attr("recurrent_numbers") = kInputNumbers;
  // One direction of a layer, the one at `place` of the stack's: x (..., in) -> its columns of y (..., directions * width);
  // its part of state (ways, batch, width) and of memory (ways, batch, hidden), of an LSTM, as they end. Where y has two
  // directions every second place goes backward. The weights are those of `products`; `projection` is -1 where there is none.
  bind_call(m, "recurrent", +[](RowOf<RecurrentKernel> index, int cell_index, ProductAt input, ProductAt recurrent, ProductAt projection, const Operand& x,
                                const Operand& sizes, const Operand& input_weight, const Operand& input_bias,
                                const Operand& recurrent_weight, const Operand& recurrent_bias,
                                const Operand& projection_weight, const Operand& first_state,
                                const Operand& first_memory, const Answer& y, const Answer& state,
                                const Answer& memory, int place, Threads threads) {
    const RecurrentKernel& kernel = row(kRecurrentKernels, index);
    const Border border(kernel.name);
    if (cell_index < 0 || cell_index > static_cast<int>(Cell::relu)) throw std::invalid_argument("no such cell");
    const Cell cell = static_cast<Cell>(cell_index);
    const Rows from = border.rows(x, "input", {Type::f32}), to = border.rows(y, "answer", {Type::f32});
    const States last(border, state, "state");
    if (place < 0 || place >= last.ways) throw std::invalid_argument("no such direction");
    const int64_t directions = to.width / last.width, way = directions == 2 ? place % 2 : 0;
    border.require(to.width == directions * last.width && (directions == 1 || directions == 2), state, "state",
                   "(ways, batch, width of a direction of the answer)");
    border.require(to.rows == from.rows, y, "answer", "as many rows as the input");
    int64_t hidden = last.width, steps = 0;
    border.require(cell == Cell::lstm || (projection < 0 && !memory.given()), memory, "memory", "None but of an LSTM");
    std::optional<States> kept;
    if (cell == Cell::lstm) {
      kept.emplace(border, memory, "memory");
      border.require(kept->ways == last.ways && kept->batch == last.batch, memory, "memory", "(ways, batch, hidden)");
      hidden = kept->width;
      border.require(projection >= 0 || hidden == last.width, memory, "memory", "the state's shape");
    }
    const int64_t* counts = sizes_of(border, sizes, from, last.batch, &steps);
    border.require(counts != nullptr || product_is(from.rows, steps, last.batch, 1), x, "input", "whole steps of the batch");
    const int64_t width = gates_of(cell) * hidden;
    const Numbers of_input = border.numbers(input_bias, "input bias", width);
    const Numbers of_state = border.numbers(recurrent_bias, "recurrent bias", width);
    Sequence sequence{cell, &kernel, part_of(border, input, input_weight, "input weight", of_input, width, from.width),
                      part_of(border, recurrent, recurrent_weight, "recurrent weight", of_state, width, last.width), {},
                      reinterpret_cast<const float*>(from.data), from.stride,
                      reinterpret_cast<float*>(to.data) + way * last.width, to.stride, last.at(place),
                      kept ? kept->at(place) : nullptr, steps, last.batch, from.rows, hidden, counts,
                      way == 1, threads};
    if (projection >= 0)
      sequence.projection = part_of(border, projection, projection_weight, "projection", {}, last.width, hidden);
    last.begin(border, first_state, "first state", place);
    if (kept) kept->begin(border, first_memory, "first memory", place);
    run_sequence(border, sequence);
  });
}

}  // namespace twofour
