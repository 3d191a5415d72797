// The interpreter of a fused block: one step after the other over the numbers of a tile, which stay in the first cache;
// cheap ones in a row are one pass (chain.h).
// Internal linkage: every instruction-set file has its own.
//
//   tile      tile_rows rows of tile_width places, one after the other: a row of 5000 places is cut into five tiles of
//             one row, 64 rows of 16 places are one tile
//   register  that many numbers and a vector of padding; `base` says where they stand: in scratch, or in an operand
//             itself where that has them in one piece
#pragma once

#include "ahead.h"
#include "chain.h"
#include "fused_block.h"
#include "kernels/precise_math.h"
#include "native/simd.h"
#include "operands.h"
#include "row_numbers.h"
#include "step_math.h"

namespace {

using twofour::kNumber;
using twofour::kRowRegister;
using twofour::Loop;
using twofour::Step;
using twofour::StepOp;

template <class V>
class Tiles : TileOperands<V> {
  using Operands = TileOperands<V>;
  using Operands::block_, Operands::rows_, Operands::from_, Operands::width_, Operands::count_;
  using Operands::place, Operands::in_place, Operands::gather, Operands::scatter, Operands::streams;
  using M = PreciseMath<V>;
  using F = typename V::reg;

 public:
  Tiles(const Block& block, float* scratch) : Operands(block) {
    auto* at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64);
    for (int i = 0; i < block.registers; i++) {
      base_[i] = own_[i] = at;
      at += block.of_register(i);
    }
    for (int i = 0; i < block.row_registers; i++) {
      row_[i] = at;
      at += block.padded(block.tile_rows);
    }
    for (int i = 0; i < block.input_count; i++) {
      stays_[i] = block.stays(block.inputs[i]) ? at : nullptr;
      if (stays_[i]) at += block.of_tile();
    }
  }

  void run(int64_t begin, int64_t end) {
    const int64_t pieces = block_.reduces ? 1 : block_.pieces(), passes = passes_of_unit();
    for (int64_t unit = begin; unit < end; unit++) {
      place(unit / pieces * block_.tile_rows);
      if (unit + 1 < end && block_.reads_ahead) ahead_.aim(block_, unit + 1, passes * rows_ * (block_.reduces ? block_.width : block_.tile_width));
      else ahead_.stop();
      for (int i = 0; i < block_.loop_count; i++) {
        const Loop& loop = block_.loops[i];
        if (loop.rows) {
          from_ = 0;
          count_ = rows_;
          steps(loop);
        } else if (block_.reduces) {
          for (int64_t from = 0; from < block_.width; from += block_.tile_width) tile(loop, from);
        } else {
          tile(loop, unit % pieces * block_.tile_width);
        }
      }
    }
    if (block_.streams) V::order_streams();
  }

 private:
  // How often the places of a unit are gone through.
  int64_t passes_of_unit() const {
    int64_t passes = 0;
    for (int i = 0; i < block_.loop_count; i++) {
      const Loop& loop = block_.loops[i];
      for (int k = loop.begin; !loop.rows && k < loop.end; k += block_.steps[k].chain)
        passes += block_.steps[k].op != StepOp::load && block_.steps[k].op != StepOp::store;
    }
    return passes;
  }

  void tile(const Loop& loop, int64_t from) {
    from_ = from;
    width_ = block_.width - from < block_.tile_width ? block_.width - from : block_.tile_width;
    count_ = rows_ * width_;
    for (int i = 0; i < block_.registers; i++)
      if (block_.kept[i]) base_[i] = own(i);
    steps(loop);
  }

  float* own(int i) const { return own_[i] + (block_.kept[i] ? from_ : 0); }

  void load(const Step& step) {
    const BlockOperand& operand = block_.inputs[step.a];
    if (step.to >= kRowRegister) return gather(operand, row_[step.to - kRowRegister], 1);
    if (block_.kept[step.to]) return gather(operand, target(step.to), width_);
    halves_[step.to] = stays_[step.a] ? nullptr : this->template in_place<uint16_t>(operand);
    if (halves_[step.to]) return;
    float* at = in_place(operand);
    if (!at && stays_[step.a]) {  // every tile reads the same
      at = stays_[step.a];
      // The first tile may be the last and shorter piece of a row; the others read on from it.
      if (!gathered_[step.a]) gather(operand, at, block_.tile_width);
      gathered_[step.a] = true;
      repeats_[step.to] = at;
    }
    if (at) base_[step.to] = at;
    else gather(operand, target(step.to), width_);
  }

  void store(const Step& step) {
    const BlockOperand& operand = block_.outputs[step.to];
    const float* from = source(step.a);
    if (operand.type == Type::f32 && operand.inner == 1 && from == in_place(operand)) return;  // computed there
    scatter(operand, from, step.a >= kRowRegister ? 1 : width_);
  }

  const float* source(int i) {
    if (i >= kRowRegister) return row_[i - kRowRegister];
    if (halves_[i]) widen(i);
    return base_[i];
  }
  Places places(int i) const { return {halves_[i] ? nullptr : base_[i], halves_[i], !halves_[i] && base_[i] == repeats_[i]}; }
  // What stands as bfloat16 in an operand -> its register.
  TWOFOUR_NOINLINE void widen(int i) {
    const uint16_t* from = halves_[i];
    float* to = base_[i] = own(i);
    halves_[i] = nullptr;
    sweep([&](int64_t k) { V::store_unaligned(to + k, V::load_unaligned(from + k)); });
  }
  float* target(int i) {
    if (i >= kRowRegister) return row_[i - kRowRegister];
    halves_[i] = nullptr;
    return base_[i] = straight_ ? straight_ : own(i);
  }

  // Calls body(i) for each vector of a tile.
  template <class Body>
  TWOFOUR_INLINE void sweep(const Body& body) {
    constexpr int64_t kGroup = 8 * V::width;
    const int64_t count = count_;
    for (int64_t i = 0; i < count;) {
      const int64_t end = i + kGroup < count ? i + kGroup : count;
      for (; i < end; i += V::width) body(i);
      ahead_.after(kGroup);
    }
  }
  static TWOFOUR_INLINE void put(float* y, F v, bool stream) {
    if (stream) V::stream(y, v);
    else V::store_unaligned(y, v);
  }

  template <class Of>
  TWOFOUR_INLINE void unary(const Step& step, const Of& of) {
    const float* a = source(step.a);
    float* y = target(step.to);
    const bool stream = streams_;
    sweep([&](int64_t i) { put(y + i, of(V::load_unaligned(a + i)), stream); });
  }

  template <class Of>
  TWOFOUR_INLINE void binary(const Step& step, const Of& of) {
    const float* a = source(step.a);
    const bool stream = streams_;
    if (step.b == kNumber) {
      float* y = target(step.to);
      const F b = M::all(step.value);
      sweep([&](int64_t i) { put(y + i, of(V::load_unaligned(a + i), b), stream); });
    } else if (step.b >= kRowRegister && step.to < kRowRegister) {
      // Each row by itself; what is written past its end belongs to the next, which comes after, or is padding. So the
      // target is never the first operand unless the tile has one row.
      const float* b = source(step.b);
      float* y = target(step.to);
      for (int64_t r = 0; r < rows_; r++) {
        const F of_row = M::all(b[r]);
        const float* x = a + r * width_;
        float* to = y + r * width_;
        // Behind the last row there may be no memory: the first operand can be an input where it stands.
        const int64_t readable = count_ - r * width_;
        for (int64_t i = 0; i < width_; i += V::width) put(to + i, of(V::load(x + i, readable - i), of_row), stream);
        ahead_.after(width_);
      }
    } else {
      const float* b = source(step.b);
      float* y = target(step.to);
      sweep([&](int64_t i) { put(y + i, of(V::load_unaligned(a + i), V::load_unaligned(b + i)), stream); });
    }
  }

  template <class Of>
  TWOFOUR_INLINE void ternary(const Step& step, const Of& of) {
    const float *a = source(step.a), *b = source(step.b), *c = source(step.c);
    float* y = target(step.to);
    const bool stream = streams_;
    sweep([&](int64_t i) { put(y + i, of(V::load_unaligned(a + i), V::load_unaligned(b + i), V::load_unaligned(c + i)), stream); });
  }

  void reduce(const Step& step) {
    RowNumbers<V> numbers(step.op, row_[step.to - kRowRegister], from_ != 0);
    reduction<V>(step.op, [&](float first, const auto& of) {
      const float* a = source(step.a);
      for (int64_t r = 0; r < rows_; r++) {
        numbers.put(of_row(a + r * width_, first, of));
        ahead_.after(width_);
      }
    });
    numbers.finish();
  }

  // Four vectors at a time hide the latency of a sum, and sum more exactly than one.
  template <class Of>
  TWOFOUR_INLINE F of_row(const float* x, float first, const Of& of) const {
    const F none = M::all(first);
    if (width_ < V::width) {
      F last = none;
      for (int k = 0; k < width_; k++) last[k] = x[k];
      return last;
    }
    F parts[4] = {none, none, none, none};
    int64_t i = 0;
    for (; i + 4 * V::width <= width_; i += 4 * V::width)
      for (int k = 0; k < 4; k++) parts[k] = of(parts[k], V::load_unaligned(x + i + k * V::width));
    for (; i + V::width <= width_; i += V::width) parts[0] = of(parts[0], V::load_unaligned(x + i));
    if (i < width_) {  // the last vector of the row, less what has been read of it
      const int32_t read = static_cast<int32_t>(V::width - (width_ - i));
      parts[1] = of(parts[1], M::select(M::places() >= read, V::load_unaligned(x + width_ - V::width), none));
    }
    return of(of(parts[0], parts[1]), of(parts[2], parts[3]));
  }

  void steps(const Loop& loop) {
    for (int i = loop.begin; i < loop.end;) {
      const Step* step = block_.steps + i;
      const int count = loop.rows || !whole_rows(step) ? 1 : step->chain;
      i += count;
      const Step* next = i < loop.end ? block_.steps + i : nullptr;
      straight_ = next ? straight<float>(step[count - 1], *next) : nullptr;
      streams_ = straight_ && streams(straight_);
      if (count > 1 || (!loop.rows && of_halves(*step, next))) i += chain(step, count, next);
      else one(*step);
    }
  }

  // Whether a chain may run row by row in whole vectors.
  bool whole_rows(const Step* first) const {
    if (width_ % V::width == 0) return true;
    for (int i = 0; i < first->chain; i++)
      if ((rows_ > 1 && first[i].b >= kRowRegister) || first[i].to >= kRowRegister) return false;
    return true;
  }

  // Whether a step by itself is a pass of links all the same: one that reads or writes bfloat16 where that stands.
  bool of_halves(const Step& step, const Step* next) const {
    if (!(is_link(step.op) || step.to >= kRowRegister) || !whole_rows(&step)) return false;
    const bool reads = halves_[step.a] || (is_binary(step.op) && step.b != kNumber && step.b < kRowRegister && halves_[step.b]);
    return reads || (next && straight<uint16_t>(step, *next));
  }
  static constexpr bool is_link(StepOp op) {
    switch (op) {
#define TWOFOUR_LINK(name, result) case StepOp::name:
#include "links.def"
      return true;
      default: return false;
    }
  }

  // Several steps at once, whose results between them stay in vector registers; the last may be a reduction.
  // Returns 1 where the `next` step, a store, is done too.
  TWOFOUR_NOINLINE int chain(const Step* steps, int count, const Step* next) {
    const Step& last = steps[count - 1];
    const bool reduces = last.to >= kRowRegister;
    if (reduces) count--;
    uint16_t* halves = next ? straight<uint16_t>(last, *next) : nullptr;
    Chain<V> chain(places(steps[0].a), rows_, width_, row_of_, ahead_);
    for (int i = 0; i < count; i++) {
      const Step& step = steps[i];
      const bool binary = step.b != kNumber && is_binary(step.op), of_rows = binary && step.b >= kRowRegister;
      const bool ends = &step == &last;
      // Taken before the target is: that may be the same register, which then stands elsewhere.
      const Places second = binary && !of_rows ? places(step.b) : Places{};
      const float* rows = of_rows ? source(step.b) : nullptr;
      typename Chain<V>::Target to{};
      if (ends && halves) to.halves = halves, to.stream = streams(halves);
      else if (ends) to.floats = target(step.to), to.stream = streams_;
      else if (step.lasts) to.floats = base_[step.to] = own(step.to), halves_[step.to] = nullptr;
      chain.add(step.op, second, rows, step.value, to);
    }
    if (!reduces) return chain.run(), halves != nullptr;
    RowNumbers<V> numbers(last.op, row_[last.to - kRowRegister], from_ != 0);
    chain.reduce(numbers, block_.streams && !block_.reads_ahead);
    numbers.finish();
    return 0;
  }
  static constexpr bool is_binary(StepOp op) { return op >= StepOp::add && op <= StepOp::ge; }

  // Where the step may leave its result, if the next one stores it as it is: in the output itself.
  // As bfloat16 it is rounded, so that nobody else may read it.
  template <class T>
  T* straight(const Step& step, const Step& next) const {
    if (sizeof(T) < sizeof(float) && step.lasts) return nullptr;
    if (next.op != StepOp::store || next.a != step.to || step.to >= kRowRegister || block_.kept[step.to]) return nullptr;
    if (step.op == StepOp::load || step.op == StepOp::store) return nullptr;
    if (step.b >= kRowRegister && width_ % V::width != 0) return nullptr;  // rows are written past their ends
    return this->template in_place<T>(block_.outputs[next.to]);
  }

  TWOFOUR_NOINLINE void one(const Step& s) {
    switch (s.op) {
      case StepOp::load: return load(s);
      case StepOp::store: return store(s);
      case StepOp::fill: return unary_fill(s, s.value);
      case StepOp::over_width: {
        const float width = static_cast<float>(block_.width);
        return unary(s, [width](F x) { return x / width; });
      }
      case StepOp::where: return ternary(s, [](F c, F a, F b) { return M::select(c != 0.0f, a, b); });
      case StepOp::fma: return ternary(s, [](F a, F b, F c) { return a * b + c; });
      case StepOp::sum:
      case StepOp::amax:
      case StepOp::amin:
      case StepOp::prod: return reduce(s);
#define TWOFOUR_STEP(name, result)                                                         \
  case StepOp::name:                                                                       \
    if constexpr (is_binary(StepOp::name)) return binary(s, [](F a, F b) { return result; }); \
    else return unary(s, [](F a) {                                                         \
      [[maybe_unused]] const F b = a;                                                      \
      return result;                                                                       \
    });
#define TWOFOUR_LINK TWOFOUR_STEP
#include "links.def"
#include "steps.def"
    }
  }

  void unary_fill(const Step& step, float value) {
    float* y = target(step.to);
    sweep([&](int64_t i) { V::store_unaligned(y + i, M::all(value)); });
  }

  float* own_[twofour::kMostRegisters];
  float* row_[twofour::kMostRegisters];
  float* base_[twofour::kMostRegisters] = {};
  const uint16_t* halves_[twofour::kMostRegisters] = {};  // where a register's numbers stand as bfloat16, if they do
  float* stays_[twofour::kMostOperands];  // where a tile of an input stands that is the same for all tiles
  bool gathered_[twofour::kMostOperands] = {};
  const float* repeats_[twofour::kMostRegisters] = {};  // where a register stood when it last was one of those
  float* straight_ = nullptr;  // where the step at hand leaves its result, if not in its register
  bool streams_ = false;       // and whether past the caches
  Ahead ahead_;
  RowOfVector<V> row_of_;
};

}  // namespace
