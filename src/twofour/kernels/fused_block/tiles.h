// The interpreter of a fused block: one step after the other over the numbers of a tile, which stay in the first cache.
// Internal linkage: every instruction-set file has its own.
//
//   tile      tile_rows rows of tile_width places, one after the other: a row of 5000 places is cut into five tiles of
//             one row, 64 rows of 16 places are one tile
//   register  that many numbers and a vector of padding; `base` says where they stand: in scratch, or in an operand
//             itself where that has them in one piece
#pragma once

#include <cstring>

#include "fused_block.h"
#include "native/simd.h"
#include "kernels/precise_math.h"

namespace {

using twofour::Block;
using twofour::BlockOperand;
using twofour::kNumber;
using twofour::kRowRegister;
using twofour::Loop;
using twofour::Step;
using twofour::StepOp;
using twofour::Type;

template <class V>
class Tiles {
  using M = PreciseMath<V>;
  using F = typename V::reg;

 public:
  Tiles(const Block& block, float* scratch) : block_(block) {
    auto* at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64);
    for (int i = 0; i < block.registers; i++) {
      base_[i] = own_[i] = at;
      at += block.of_register(i);
    }
    for (int i = 0; i < block.row_registers; i++) {
      row_[i] = at;
      at += block.padded(block.tile_rows);
    }
  }

  void run(int64_t begin, int64_t end) {
    const int64_t pieces = block_.reduces ? 1 : block_.pieces();
    for (int64_t unit = begin; unit < end; unit++) {
      first_ = unit / pieces * block_.tile_rows;
      rows_ = block_.rows - first_ < block_.tile_rows ? block_.rows - first_ : block_.tile_rows;
      place();
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
  }

 private:
  void tile(const Loop& loop, int64_t from) {
    from_ = from;
    width_ = block_.width - from < block_.tile_width ? block_.width - from : block_.tile_width;
    count_ = rows_ * width_;
    for (int i = 0; i < block_.registers; i++)
      if (block_.kept[i]) base_[i] = own(i);
    steps(loop);
  }

  float* own(int i) const { return own_[i] + (block_.kept[i] ? from_ : 0); }

  // Where each operand has the tile's first row, and the distance of its rows where that is one.
  void place() {
    int64_t left = first_;
    for (int a = block_.axes - 1; a >= 0; a--) {
      index_[a] = left % block_.sizes[a];
      left /= block_.sizes[a];
    }
  }

  // Calls use(row, offset) with the operand's offset of each row of the tile, in numbers.
  template <class Use>
  TWOFOUR_INLINE void each_row(const BlockOperand& operand, const Use& use) const {
    int64_t index[twofour::kOuterAxes] = {}, offset = from_ * operand.inner;
    for (int a = 0; a < block_.axes; a++) {
      index[a] = index_[a];
      offset += index[a] * operand.strides[a];
    }
    const int last = block_.axes - 1;
    const int64_t stride = last < 0 ? 0 : operand.strides[last];
    for (int64_t r = 0; r < rows_;) {
      const int64_t left = last < 0 ? 1 : block_.sizes[last] - index[last], end = r + left < rows_ ? r + left : rows_;
      index[last < 0 ? 0 : last] += end - r;
      for (; r < end; r++, offset += stride) use(r, offset);
      if (r == rows_) return;
      for (int a = last; a > 0; a--) {
        offset += operand.strides[a - 1] - operand.strides[a] * block_.sizes[a];
        index[a] = 0;
        if (++index[a - 1] < block_.sizes[a - 1]) break;
      }
    }
  }

  // The operand's numbers of the tile, if they stand together as floats and whole vectors of them may be touched.
  float* in_place(const BlockOperand& operand) const {
    const bool together = rows_ == 1 || (block_.axes == 1 && operand.strides[0] == width_);
    if (operand.type != Type::f32 || operand.inner != 1 || !together || count_ % V::width != 0) return nullptr;
    return reinterpret_cast<float*>(operand.data) + offset_of(operand);
  }
  // Of the tile's first number.
  int64_t offset_of(const BlockOperand& operand) const {
    int64_t offset = from_ * operand.inner;
    for (int a = 0; a < block_.axes; a++) offset += index_[a] * operand.strides[a];
    return offset;
  }

  static float from_bits(uint16_t bits) {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }

  template <class T, class Read>
  void gather(const BlockOperand& operand, float* to, int64_t width, const Read& read) const {
    const T* from = reinterpret_cast<const T*>(operand.data);
    const int64_t inner = operand.inner;
    if (inner == 1) {
      each_row(operand, [&](int64_t r, int64_t offset) {
        const T* x = from + offset;
        float* y = to + r * width;
        int64_t i = 0;
        if constexpr (sizeof(T) > 1)
          for (; i + V::width <= width; i += V::width) V::store_unaligned(y + i, V::load_unaligned(x + i));
        for (; i < width; i++) y[i] = read(x[i]);
      });
    } else {
      each_row(operand, [&](int64_t r, int64_t offset) {
        float* y = to + r * width;
        if (inner == 0) {
          const float value = read(from[offset]);
          for (int64_t i = 0; i < width; i++) y[i] = value;
        } else {
          for (int64_t i = 0; i < width; i++) y[i] = read(from[offset + i * inner]);
        }
      });
    }
  }

  void load(const Step& step) {
    const BlockOperand& operand = block_.inputs[step.a];
    if (step.to < kRowRegister && !block_.kept[step.to])
      if (float* at = in_place(operand)) {
        base_[step.to] = at;
        return;
      }
    float* to = target(step.to);
    const int64_t width = step.to >= kRowRegister ? 1 : width_;
    if (operand.type == Type::f32) gather<float>(operand, to, width, [](float v) { return v; });
    else if (operand.type == Type::bf16) gather<uint16_t>(operand, to, width, from_bits);
    else gather<uint8_t>(operand, to, width, [](uint8_t v) { return static_cast<float>(v); });
  }

  void store(const Step& step) {
    const BlockOperand& operand = block_.outputs[step.to];
    const float* from = source(step.a);
    if (operand.type == Type::f32 && operand.inner == 1 && from == in_place(operand)) return;  // computed there
    const bool of_rows = step.a >= kRowRegister;
    const int64_t width = of_rows ? 1 : width_, inner = operand.inner;
    each_row(operand, [&](int64_t r, int64_t offset) {
      const float* x = from + r * width;
      if (operand.type == Type::f32) {
        float* y = reinterpret_cast<float*>(operand.data) + offset;
        int64_t i = 0;
        if (inner == 1)
          for (; i + V::width <= width; i += V::width) V::store_unaligned(y + i, V::load_unaligned(x + i));
        for (; i < width; i++) y[i * inner] = x[i];
      } else if (operand.type == Type::bf16) {
        uint16_t* y = reinterpret_cast<uint16_t*>(operand.data) + offset;
        for (int64_t i = 0; i < width; i++) y[i * inner] = to_bits(x[i]);
      } else {
        uint8_t* y = reinterpret_cast<uint8_t*>(operand.data) + offset;
        for (int64_t i = 0; i < width; i++) y[i * inner] = x[i] != 0.0f;
      }
    });
  }
  static uint16_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t even = bits + 0x7fff + (bits >> 16 & 1);
    return static_cast<uint16_t>((value == value ? even : bits | 0x400000) >> 16);
  }

  const float* source(int i) const { return i >= kRowRegister ? row_[i - kRowRegister] : base_[i]; }
  float* target(int i) {
    if (i >= kRowRegister) return row_[i - kRowRegister];
    return base_[i] = straight_ ? straight_ : own(i);
  }

  template <class Of>
  TWOFOUR_INLINE void unary(const Step& step, const Of& of) {
    const float* a = source(step.a);
    float* y = target(step.to);
    for (int64_t i = 0; i < count_; i += V::width) V::store_unaligned(y + i, of(V::load_unaligned(a + i)));
  }

  template <class Of>
  TWOFOUR_INLINE void binary(const Step& step, const Of& of) {
    const float* a = source(step.a);
    if (step.b == kNumber) {
      float* y = target(step.to);
      const F b = M::all(step.value);
      for (int64_t i = 0; i < count_; i += V::width) V::store_unaligned(y + i, of(V::load_unaligned(a + i), b));
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
        for (int64_t i = 0; i < width_; i += V::width) V::store_unaligned(to + i, of(V::load(x + i, readable - i), of_row));
      }
    } else {
      const float* b = source(step.b);
      float* y = target(step.to);
      for (int64_t i = 0; i < count_; i += V::width) V::store_unaligned(y + i, of(V::load_unaligned(a + i), V::load_unaligned(b + i)));
    }
  }

  template <class Of>
  TWOFOUR_INLINE void ternary(const Step& step, const Of& of) {
    const float *a = source(step.a), *b = source(step.b), *c = source(step.c);
    float* y = target(step.to);
    for (int64_t i = 0; i < count_; i += V::width) V::store_unaligned(y + i, of(V::load_unaligned(a + i), V::load_unaligned(b + i), V::load_unaligned(c + i)));
  }

  // Rows to one vector each, then V::width of them at once to one number each.
  template <class Of>
  TWOFOUR_INLINE void reduce(const Step& step, float first, const Of& of) {
    const float* a = source(step.a);
    float* y = row_[step.to - kRowRegister];
    for (int64_t r = 0; r < rows_; r += V::width) {
      F parts[V::width];
      for (int k = 0; k < V::width; k++) parts[k] = r + k < rows_ ? of_row(a + (r + k) * width_, first, of) : M::all(first);
      F all = M::across(parts, of);
      if (from_ != 0) all = of(V::load_unaligned(y + r), all);
      V::store_unaligned(y + r, all);  // a row register has a vector of padding
    }
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
      straight_ = i < loop.end ? straight(step[count - 1], block_.steps[i]) : nullptr;
      if (count > 1) chain(step, count);
      else one(*step);
    }
  }

  // Whether a chain may run row by row without writing past a row's end.
  bool whole_rows(const Step* first) const {
    if (rows_ == 1 || width_ % V::width == 0) return true;
    for (int i = 0; i < first->chain; i++)
      if (first[i].b >= kRowRegister) return false;
    return true;
  }

  // A step of a chain: its second operand's numbers, or the one number there is.
  struct Link {
    StepOp op;
    const float *places, *of_rows;
    float value;
  };

  // Several steps at once, whose results between them stay in vector registers.
  TWOFOUR_NOINLINE void chain(const Step* steps, int count) {
    Link links[twofour::kMostChain];
    bool by_row = false;
    for (int i = 0; i < count; i++) {
      const int b = steps[i].b;
      const bool binary = b != kNumber && is_binary(steps[i].op), of_rows = binary && b >= kRowRegister;
      by_row |= of_rows;
      links[i] = {steps[i].op, binary && !of_rows ? base_[b] : nullptr, of_rows ? row_[b - kRowRegister] : nullptr, steps[i].value};
    }
    const float* a = source(steps[0].a);
    float* y = target(steps[count - 1].to);
    const int64_t rows = by_row ? rows_ : 1, width = by_row ? width_ : count_;
    for (int64_t r = 0; r < rows; r++) {
      for (int i = 0; i < count; i++)
        if (links[i].of_rows) links[i].value = links[i].of_rows[r];
      int64_t at = r * width;
      const int64_t end = at + width;
      for (; at + 8 * V::width <= end; at += 8 * V::width) linked<8>(links, count, a, y, at);
      for (; at < end; at += V::width) linked<1>(links, count, a, y, at);
    }
  }
  static bool is_binary(StepOp op) { return op >= StepOp::add && op <= StepOp::ge; }

  // One group of vectors through all links.
  template <int kVectors>
  TWOFOUR_INLINE static void linked(const Link* links, int count, const float* from, float* y, int64_t at) {
    F x[kVectors];
    TWOFOUR_UNROLL
    for (int k = 0; k < kVectors; k++) x[k] = V::load_unaligned(from + at + k * V::width);
    for (int i = 0; i < count; i++) {
      const Link& link = links[i];
      switch (link.op) {
#define TWOFOUR_LINK(name, result)                                           \
  case StepOp::name:                                                         \
    if (link.places) {                                                       \
      TWOFOUR_UNROLL                                                         \
      for (int k = 0; k < kVectors; k++) {                                   \
        const F a = x[k], b = V::load_unaligned(link.places + at + k * V::width); \
        x[k] = result;                                                       \
        (void)b;                                                             \
      }                                                                      \
    } else {                                                                 \
      const F b = M::all(link.value);                                        \
      TWOFOUR_UNROLL                                                         \
      for (int k = 0; k < kVectors; k++) {                                   \
        const F a = x[k];                                                    \
        x[k] = result;                                                       \
      }                                                                      \
      (void)b;                                                               \
    }                                                                        \
    break;
#include "links.def"
        default:
          break;
      }
    }
    TWOFOUR_UNROLL
    for (int k = 0; k < kVectors; k++) V::store_unaligned(y + at + k * V::width, x[k]);
  }

  // Where the step may leave its result, if the next one stores it as it is: in the output itself.
  float* straight(const Step& step, const Step& next) const {
    if (next.op != StepOp::store || next.a != step.to || step.to >= kRowRegister || block_.kept[step.to]) return nullptr;
    if (step.op == StepOp::load || step.op == StepOp::store) return nullptr;
    if (step.b >= kRowRegister && width_ % V::width != 0) return nullptr;  // rows are written past their ends
    return in_place(block_.outputs[next.to]);
  }

  TWOFOUR_NOINLINE void one(const Step& s) {
    const float value = s.value;
    switch (s.op) {
      case StepOp::load: return load(s);
      case StepOp::store: return store(s);
      case StepOp::fill: return unary_fill(s, value);
      case StepOp::neg: return unary(s, [](F x) { return -x; });
      case StepOp::abs: return unary(s, [](F x) { return M::absolute(x); });
      case StepOp::sqrt: return unary(s, [](F x) { return V::sqrt(x); });
      case StepOp::rsqrt: return unary(s, [](F x) { return 1.0f / V::sqrt(x); });
      case StepOp::reciprocal: return unary(s, [](F x) { return 1.0f / x; });
      case StepOp::square: return unary(s, [](F x) { return x * x; });
      case StepOp::exp: return unary(s, [](F x) { return M::exp(x); });
      case StepOp::expm1: return unary(s, [](F x) { return M::expm1(x); });
      case StepOp::log: return unary(s, [](F x) { return M::log(x); });
      case StepOp::log1p: return unary(s, [](F x) { return M::log1p(x); });
      case StepOp::sin: return unary(s, [](F x) { return M::sin(x); });
      case StepOp::cos: return unary(s, [](F x) { return M::cos(x); });
      case StepOp::tanh: return unary(s, [](F x) { return M::tanh(x); });
      case StepOp::erf: return unary(s, [](F x) { return M::erf(x); });
      case StepOp::sigmoid: return unary(s, [](F x) { return M::sigmoid(x); });
      case StepOp::silu: return unary(s, [](F x) { return M::silu(x); });
      case StepOp::gelu: return unary(s, [](F x) { return M::gelu(x); });
      case StepOp::gelu_tanh: return unary(s, [](F x) { return M::gelu_tanh(x); });
      case StepOp::relu: return unary(s, [](F x) { return M::relu(x); });
      case StepOp::floor: return unary(s, [](F x) { return M::floor(x); });
      case StepOp::ceil: return unary(s, [](F x) { return M::ceil(x); });
      case StepOp::round: return unary(s, [](F x) { return M::round(x); });
      case StepOp::trunc: return unary(s, [](F x) { return M::trunc(x); });
      case StepOp::sign: return unary(s, [](F x) { return M::sign(x); });
      case StepOp::logical_not: return unary(s, [](F x) { return M::truth(x == 0.0f); });
      case StepOp::isnan: return unary(s, [](F x) { return M::truth(x != x); });
      case StepOp::rounded: return unary(s, [](F x) { return M::rounded_to_bfloat16(x); });
      case StepOp::over_width: {
        const float width = static_cast<float>(block_.width);
        return unary(s, [width](F x) { return x / width; });
      }
      case StepOp::add: return binary(s, [](F a, F b) { return a + b; });
      case StepOp::sub: return binary(s, [](F a, F b) { return a - b; });
      case StepOp::mul: return binary(s, [](F a, F b) { return a * b; });
      case StepOp::div: return binary(s, [](F a, F b) { return a / b; });
      case StepOp::rsub: return binary(s, [](F a, F b) { return b - a; });
      case StepOp::rdiv: return binary(s, [](F a, F b) { return b / a; });
      case StepOp::maximum: return binary(s, [](F a, F b) { return M::maximum(a, b); });
      case StepOp::minimum: return binary(s, [](F a, F b) { return M::minimum(a, b); });
      case StepOp::pow: return binary(s, [](F a, F b) { return power(a, b); });
      case StepOp::eq: return binary(s, [](F a, F b) { return M::truth(a == b); });
      case StepOp::ne: return binary(s, [](F a, F b) { return M::truth(a != b); });
      case StepOp::lt: return binary(s, [](F a, F b) { return M::truth(a < b); });
      case StepOp::le: return binary(s, [](F a, F b) { return M::truth(a <= b); });
      case StepOp::gt: return binary(s, [](F a, F b) { return M::truth(a > b); });
      case StepOp::ge: return binary(s, [](F a, F b) { return M::truth(a >= b); });
      case StepOp::where: return ternary(s, [](F c, F a, F b) { return M::select(c != 0.0f, a, b); });
      case StepOp::fma: return ternary(s, [](F a, F b, F c) { return a * b + c; });
      case StepOp::sum: return reduce(s, 0.0f, [](F a, F b) { return a + b; });
      case StepOp::amax: return reduce(s, -M::kInfinity, [](F a, F b) { return M::maximum(a, b); });
      case StepOp::amin: return reduce(s, M::kInfinity, [](F a, F b) { return M::minimum(a, b); });
      case StepOp::prod: return reduce(s, 1.0f, [](F a, F b) { return a * b; });
    }
  }

  void unary_fill(const Step& step, float value) {
    float* y = target(step.to);
    for (int64_t i = 0; i < count_; i += V::width) V::store_unaligned(y + i, M::all(value));
  }

  static F power(F a, F b) {
    F y = a;
    for (int i = 0; i < V::width; i++) y[i] = __builtin_powf(a[i], b[i]);
    return y;
  }

  const Block& block_;
  float* own_[twofour::kMostRegisters];
  float* row_[twofour::kMostRegisters];
  float* base_[twofour::kMostRegisters] = {};
  float* straight_ = nullptr;
  int64_t index_[twofour::kOuterAxes] = {};
  int64_t first_ = 0, rows_ = 0, from_ = 0, width_ = 0, count_ = 0;
};

}  // namespace
