// Recurrent layers for Python: the table of gates, and one call for all steps of a direction.
#include <cstring>

#include "kernels/layouts/packed_weight.h"
#include "native/binding.h"
#include "native/scratch.h"
#include "recurrent.h"
#include "sequence.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr RecurrentKernel kRecurrentKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "recurrent", __VA_ARGS__}, symbol},
#include "recurrent.inc"
#undef TWOFOUR_ROW
};

float* floats(const View& view) { return reinterpret_cast<float*>(view.data); }

// A product inside, its weight held against the row that reads it.
Part part_of(const Border& border, int product, const Operand& weight, const char* role, const Numbers& bias, int64_t out,
             int64_t in) {
  const Product& found = product_at(product);
  const PackedWeight packed(border, weight, role);
  const RowBase& row = *found.row;
  border.require(packed.made_for(row.dtype, row.layout, out, in), weight, role,
                 std::string("layout '") + row.layout + "' of a " + row.dtype + " weight (" + std::to_string(out) + ", " +
                     std::to_string(in) + ")");
  found.require(row, packed);
  return {&found, packed.bytes(), bias.data(), out, in, packed.group(), packed.zeros()};
}

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

// What stands in `to` before the first step: the given state, or zeros.
void begin(const Border& border, const Operand& from, const char* role, const View& to) {
  const auto bytes = static_cast<size_t>(to.count()) * sizeof(float);
  if (!from.given()) {
    if (bytes != 0) std::memset(to.data, 0, bytes);
    return;
  }
  const View given = border.exactly(from, role, {Type::f32}, to.count());
  if (bytes != 0) std::memmove(to.data, given.data, bytes);
}

View matrix(const Border& border, const Operand& operand, const char* role, int64_t rows, int64_t columns) {
  const View view = border.dense(operand, role, {Type::f32});
  border.require(view.ndim == 2 && view.shape[0] == rows && view.shape[1] == columns, operand, role,
                 "(" + std::to_string(rows) + ", " + std::to_string(columns) + ")");
  return view;
}

}  // namespace

void bind_recurrent(nb::module_& m) {
  bind_table(m, kRecurrentKernels);
  // x (tokens, in) -> y (tokens, width); state (batch, width) and memory (batch, hidden), of an LSTM, as they end. The weights
  // are those of `products`; `projection` is -1 where there is none.
  bind_call(m, "recurrent", +[](int index, int cell_index, int input, int recurrent, int projection, const Operand& x,
                                const Operand& sizes, const Operand& input_weight, const Operand& input_bias,
                                const Operand& recurrent_weight, const Operand& recurrent_bias,
                                const Operand& projection_weight, const Operand& first_state,
                                const Operand& first_memory, const Answer& y, const Answer& state,
                                const Answer& memory, bool backward, int threads) {
    static Scratch scratch;
    const RecurrentKernel& kernel = row(kRecurrentKernels, index);
    const Border border(kernel.name);
    if (cell_index < 0 || cell_index > static_cast<int>(Cell::relu)) throw nb::value_error("no such cell");
    const Cell cell = static_cast<Cell>(cell_index);
    const Rows from = border.rows(x, "input", {Type::f32}), to = border.rows(y, "answer", {Type::f32});
    const View last = border.dense(state, "state", {Type::f32});
    border.require(last.ndim == 2 && last.shape[1] == to.width && to.width > 0, state, "state", "(batch, width of the answer)");
    border.require(to.rows == from.rows, y, "answer", "as many rows as the input");
    const int64_t batch = last.shape[0];
    int64_t hidden = to.width, steps = 0;
    border.require(cell == Cell::lstm || (projection < 0 && !memory.given()), memory, "memory", "None but of an LSTM");
    if (cell == Cell::lstm) {
      const View kept = border.dense(memory, "memory", {Type::f32});
      border.require(kept.ndim == 2 && kept.shape[0] == batch && kept.shape[1] > 0, memory, "memory", "(batch, hidden)");
      hidden = kept.shape[1];
      border.require(projection >= 0 || hidden == to.width, memory, "memory", "the state's shape");
    }
    const int64_t* counts = sizes_of(border, sizes, from, batch, &steps);
    border.require(counts != nullptr || product_is(from.rows, steps, batch, 1), x, "input", "whole steps of the batch");
    const int64_t width = gates_of(cell) * hidden;
    const Numbers of_input = border.numbers(input_bias, "input bias", width);
    const Numbers of_state = border.numbers(recurrent_bias, "recurrent bias", width);
    Sequence sequence{cell, &kernel, part_of(border, input, input_weight, "input weight", of_input, width, from.width),
                      part_of(border, recurrent, recurrent_weight, "recurrent weight", of_state, width, to.width), {},
                      reinterpret_cast<const float*>(from.data), from.stride, reinterpret_cast<float*>(to.data), to.stride,
                      floats(last), nullptr, steps, batch, from.rows, hidden, counts, backward, threads};
    if (projection >= 0)
      sequence.projection = part_of(border, projection, projection_weight, "projection", {}, to.width, hidden);
    begin(border, first_state, "first state", last);
    if (cell == Cell::lstm) {
      const View kept = matrix(border, memory, "memory", batch, hidden);
      begin(border, first_memory, "first memory", kept);
      sequence.memory = floats(kept);
    }
    if (from.rows == 0) return;
    bool damaged;
    {
      nb::gil_scoped_release release;
      const Scratch::Lease lease(scratch, static_cast<size_t>(sequence.bytes()));
      damaged = SequenceRun(sequence, lease.data()).run();
    }
    if (damaged) border.damaged();
  });
}

}  // namespace twofour
