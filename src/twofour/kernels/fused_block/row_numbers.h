// What a reduction leaves of the rows of a tile: a vector of each row, then one number of each. Internal linkage.
#pragma once

#include "fused_block.h"
#include "kernels/precise_math.h"

namespace {

// Calls use(first, of) with what a reduction begins with and how it takes up a number.
template <class V, class Use>
TWOFOUR_INLINE void reduction(twofour::StepOp op, const Use& use) {
  using M = PreciseMath<V>;
  using F = typename V::reg;
  using twofour::StepOp;
  switch (op) {
    case StepOp::amax: return use(-M::kInfinity, [](F a, F b) { return M::maximum(a, b); });
    case StepOp::amin: return use(M::kInfinity, [](F a, F b) { return M::minimum(a, b); });
    case StepOp::prod: return use(1.0f, [](F a, F b) { return a * b; });
    default: return use(0.0f, [](F a, F b) { return a + b; });
  }
}

template <class V>
class RowNumbers {
  using M = PreciseMath<V>;
  using F = typename V::reg;

 public:
  // To the row register at y, which has a vector of padding; `adds`: what it holds counts too.
  RowNumbers(twofour::StepOp op, float* y, bool adds) : op_(op), y_(y), adds_(adds) {}
  twofour::StepOp op() const { return op_; }

  // The next row's vector, of which each number is what some of its numbers come to.
  TWOFOUR_INLINE void put(F row) {
    held_[count_++] = row;
    if (count_ == kMost) finish();
  }
  TWOFOUR_NOINLINE void finish() {
    reduction<V>(op_, [&](float first, const auto& of) {
      for (int i = 0; i < count_; i += V::width, y_ += V::width) {
        F all = of(M::all(first), across<V::width>(held_ + i, count_ - i, of));
        if (adds_) all = of(V::load_unaligned(y_), all);
        V::store_unaligned(y_, all);
      }
    });
    count_ = 0;
  }

 private:
  // No more vectors than there are: a tile of long rows has one or two, and the next step waits for their sums.
  template <int most, class Of>
  static TWOFOUR_INLINE F across(F* rows, int count, const Of& of) {
    if constexpr (most > 1)
      if (count <= most / 2) return across<most / 2>(rows, count, of);
    for (int k = count; k < most; k++) rows[k] = rows[0];
    return M::template across<most>(rows, of);
  }

  static constexpr int kMost = V::width > 8 ? V::width : 8;  // a chain makes up to eight rows' at once
  twofour::StepOp op_;
  float* y_;
  bool adds_;
  int count_ = 0;
  F held_[kMost];
};

}  // namespace
