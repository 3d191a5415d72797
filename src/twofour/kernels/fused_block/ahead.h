// Brings the operands of the next unit of a fused block towards the cache while the present one is computed: a tile is
// read in a burst, between which memory would else be idle. Internal linkage, for kernel sources only.
#pragma once

#include "fused_block.h"
#include "native/compiler.h"

namespace {

class Ahead {
 public:
  // Begins with the lines of `unit`; they are due by the time that `places` have been computed.
  void aim(const twofour::Block& block, int64_t unit, int64_t places) {
    begin(block, unit);
    for (int i = 0; i < block.input_count; i++) add(block.inputs[i]);
    rate_ = places > 0 && lines_ <= kMostLines ? (lines_ * kOne + places - 1) / places : 0;
  }
  void stop() { rate_ = 0; }

  // So many places of a pass have been computed.
  TWOFOUR_INLINE void after(int64_t places) {
    due_ += places * rate_;
    if (due_ >= kOne) fetch();
  }

 private:
  static constexpr int64_t kLine = 64, kOne = 1 << 16;
  static constexpr int64_t kMostLines = 4096;  // 256 KB: a unit of more would push itself out of the second cache

  // `rows` pieces of `lines` lines.
  struct Span {
    const char* at;
    int64_t stride, rows, lines;
  };

  void begin(const twofour::Block& block, int64_t unit) {
    block_ = &block;
    count_ = span_ = 0;
    row_ = line_ = lines_ = due_ = 0;
    const int64_t pieces = block.reduces ? 1 : block.pieces(), first = unit / pieces * block.tile_rows;
    rows_ = block.rows - first < block.tile_rows ? block.rows - first : block.tile_rows;
    from_ = unit % pieces * block.tile_width;
    const int64_t left = block.width - from_;
    width_ = !block.reduces && block.tile_width < left ? block.tile_width : left;
    twofour::outer_index(block, first, index_);
  }

  void add(const twofour::BlockOperand& operand) {
    if (operand.rows) return;  // the rows of a table stand anywhere
    const int64_t size = operand.type == twofour::Type::f32 ? 4 : operand.type == twofour::Type::bf16 ? 2 : 1;
    int64_t offset = from_ * operand.inner;
    bool moves = offset != 0;  // else it is what the present unit reads
    for (int a = 0; a < block_->axes; a++) {
      offset += index_[a] * operand.strides[a];
      moves |= operand.strides[a] != 0;
    }
    if (!moves) return;
    const int64_t stride = block_->axes == 0 ? 0 : operand.strides[block_->axes - 1] * size;
    int64_t bytes = (operand.inner == 0 ? 1 : operand.inner == 1 ? width_ : 0) * size, rows = stride == 0 ? 1 : rows_;
    if (stride == bytes) bytes *= rows, rows = 1;
    const int64_t lines = (bytes + kLine - 1) / kLine;
    if (lines == 0) return;
    spans_[count_++] = {operand.data + offset * size, stride, rows, lines};
    lines_ += rows * lines;
  }

  TWOFOUR_NOINLINE void fetch() {
    int64_t left = due_ / kOne;
    due_ %= kOne;
    while (left > 0 && span_ < count_) {
      const Span& span = spans_[span_];
      const int64_t n = left < span.lines - line_ ? left : span.lines - line_;
      const char* at = span.at + row_ * span.stride + line_ * kLine;
      for (int64_t i = 0; i < n; i++) __builtin_prefetch(at + i * kLine, 0, 2);  // into the second cache
      left -= n;
      line_ += n;
      if (line_ < span.lines) return;
      line_ = 0;
      if (++row_ == span.rows) row_ = 0, span_++;
    }
    if (span_ == count_) rate_ = 0;
  }
  const twofour::Block* block_ = nullptr;
  Span spans_[twofour::kMostOperands];
  int count_ = 0, span_ = 0;
  int64_t row_ = 0, line_ = 0, lines_ = 0, due_ = 0, rate_ = 0;
  int64_t rows_ = 0, from_ = 0, width_ = 0, index_[twofour::kOuterAxes] = {};
};

}  // namespace
