// All steps of one direction of a recurrent layer: the product of many steps' inputs at once, then step by step the product
// of the states and the gates. Any rows of products serve.
//
//     x (tokens, in)   step 0: rows 0 .. b0, step 1: the next b1 <= b0 rows, ...   (torch's PackedSequence; all alike: b)
//        |  W_ih, up to kInputNumbers of answers at a time
//     from_input ----+
//                    +--> gates --> h --> y
//     h --> W_hh ----+              |
//     ^------- W_hr, of a projection-
//
// Every other step reads the weights of the states from the last row to the first: those that the step before read last are
// still in the caches. A weight of 1 MB in an L2 of 1 MB, read from the first row on at every step, is never there.
//
// A backward pass takes the steps from the last to the first: sequences that are shorter come in later, with their initial
// state, where in a forward pass they end earlier and leave their last one. Both are rows of `state` that a step lets be.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/matmul.h"
#include "kernels/products.h"
#include "native/integers.h"
#include "native/parallel.h"
#include "recurrent.h"

namespace twofour {

constexpr int64_t kInputNumbers = int64_t{1} << 20;  // of answers of the input product that are held at once
constexpr int64_t kGatesOfOne = 16384;             // numbers of a step's states from which threads share its rows

struct Sequence {
  Cell cell;
  const RecurrentKernel* gates;
  Part input, recurrent, projection;  // `projection` may have no product
  const float* x;                     // (tokens, in), `x_stride` apart
  int64_t x_stride;
  float* y;  // (tokens, width of a state), `y_stride` apart
  int64_t y_stride;
  float *state, *memory;  // (batch, width of a state), h, and (batch, hidden), c of an LSTM: read, and left as they end
  int64_t steps, batch, tokens, hidden;
  const int64_t* sizes;  // sequences of each step, never more than of the step before; null: `batch`
  bool backward;
  int threads;

  int64_t size(int64_t step) const { return sizes == nullptr ? batch : sizes[step]; }
  int64_t width() const { return gates_of(cell) * hidden; }
  // Rows whose inputs are multiplied at once, at least those of a step; cpu.py chooses the product by it.
  int64_t chunk() const { return least(tokens, batch > kInputNumbers / width() ? batch : kInputNumbers / width()); }

  int64_t floats() const {  // of the workspace, without that of the products
    const int64_t raw = projection.product == nullptr ? 0 : batch * hidden;
    return round_up(chunk() * width(), 16) + round_up(batch * width(), 16) + round_up(raw, 16);
  }
  // Calls visit(step, next, rows) for the steps whose inputs are multiplied at once, in the order of the pass.
  template <class Visit>
  void for_each_chunk(const Visit& visit) const {
    const int64_t most = chunk();
    for (int64_t step = 0; step < steps;) {
      int64_t rows = 0, next = step;
      while (next < steps && (rows == 0 || rows + size(place(next)) <= most)) rows += size(place(next++));
      visit(step, next, rows);
      step = next;
    }
  }
  int64_t place(int64_t step) const { return backward ? steps - 1 - step : step; }

  // Of every count of rows that there is: fewer rows may want more, where more are cut.
  int64_t product_bytes() const {
    int64_t most = 0;
    const auto add = [&](int64_t bytes) { most = bytes > most ? bytes : most; };
    for_each_chunk([&](int64_t, int64_t, int64_t rows) { add(input.workspace(rows, threads)); });
    for (int64_t step = 0; step < steps; step++) {
      if (step > 0 && size(step) == size(step - 1)) continue;
      add(recurrent.workspace(size(step), threads));
      add(projection.workspace(size(step), threads));
    }
    return round_up(most, 64);
  }
  int64_t bytes() const { return product_bytes() + 4 * floats(); }
};

// Runs one sequence; returns whether a weight was damaged.
class SequenceRun {
 public:
  SequenceRun(const Sequence& sequence, void* workspace)
      : s_(sequence),
        workspace_(static_cast<char*>(workspace) + 4 * sequence.floats()),
        from_input_(static_cast<float*>(workspace)),
        from_state_(from_input_ + round_up(sequence.chunk() * sequence.width(), 16)),
        raw_(from_state_ + round_up(sequence.batch * sequence.width(), 16)) {}

  bool run() {
    int64_t row = s_.backward ? s_.tokens : 0;
    s_.for_each_chunk([&](int64_t step, int64_t next, int64_t rows) {
      const int64_t first = s_.backward ? row - rows : row;
      multiply(s_.input, s_.x + first * s_.x_stride, s_.x_stride, from_input_, rows);
      for (; step < next; step++) {
        const int64_t size = s_.size(s_.place(step)), begin = s_.backward ? row - size : row;
        upwards_ = !upwards_;
        one(from_input_ + (begin - first) * s_.width(), s_.y + begin * s_.y_stride, size);
        row = s_.backward ? begin : row + size;
      }
    });
    return damaged_;
  }

 private:
  void multiply(const Part& part, const float* x, int64_t x_stride, float* y, int64_t rows, bool upwards = false) {
    Matmul args = part.call(x, x_stride, y, rows, s_.threads);
    args.upwards = upwards;
    args.workspace = workspace_;
    args.damaged = &damaged_;
    part.product->run(args);
  }

  void one(const float* from_input, float* y, int64_t size) {
    const bool projected = s_.projection.product != nullptr;
    multiply(s_.recurrent, s_.state, s_.recurrent.in, from_state_, size, upwards_);
    float* state = projected ? raw_ : s_.state;
    parallel_for(size, 1, size * s_.hidden < kGatesOfOne ? 1 : s_.threads, [&](int64_t begin, int64_t end) {
      s_.gates->run(s_.cell, {from_input + begin * s_.width(), from_state_ + begin * s_.width(),
                              s_.memory == nullptr ? nullptr : s_.memory + begin * s_.hidden, state + begin * s_.hidden,
                              projected ? nullptr : y + begin * s_.y_stride, s_.y_stride, end - begin, s_.hidden});
    });
    if (!projected) return;
    multiply(s_.projection, raw_, s_.hidden, s_.state, size, upwards_);
    for (int64_t r = 0; r < size; r++)
      std::memcpy(y + r * s_.y_stride, s_.state + r * s_.projection.out, static_cast<size_t>(s_.projection.out) * 4);
  }

  const Sequence& s_;
  void* workspace_;
  float *from_input_, *from_state_, *raw_;
  bool damaged_ = false, upwards_ = true;
};

}  // namespace twofour
