// The operands of a fused block as a tile reads and writes them: where they stand, or through a register.
// Internal linkage: every instruction-set file has its own.
#pragma once

#include <cstring>

#include "fused_block.h"
#include "native/simd.h"

namespace {

using twofour::Block;
using twofour::BlockOperand;
using twofour::Type;

// The tile at hand, and its operands.
template <class V>
class TileOperands {
 public:
  explicit TileOperands(const Block& block) : block_(block) {}

 protected:
  // The rows of a group of tiles begin here.
  void place(int64_t first) {
    rows_ = block_.rows - first < block_.tile_rows ? block_.rows - first : block_.tile_rows;
    outer_index(block_, first, index_);
  }

  // Calls use(row, offset) with the operand's offset of each row of the tile, in numbers: of a table that of the chosen row.
  template <class Use>
  TWOFOUR_INLINE void each_row(const BlockOperand& operand, const Use& use) const {
    const int64_t *rows = operand.rows, table_row = operand.table_row, from = from_ * operand.inner;
    int64_t index[twofour::kOuterAxes] = {}, offset = rows ? 0 : from;
    for (int a = 0; a < block_.axes; a++) {
      index[a] = index_[a];
      offset += index[a] * operand.strides[a];
    }
    const int last = block_.axes - 1;
    const int64_t stride = last < 0 ? 0 : operand.strides[last];
    for (int64_t r = 0; r < rows_;) {
      const int64_t left = last < 0 ? 1 : block_.sizes[last] - index[last], end = r + left < rows_ ? r + left : rows_;
      index[last < 0 ? 0 : last] += end - r;
      for (; r < end; r++, offset += stride) use(r, rows ? from + rows[offset] * table_row : offset);
      if (r == rows_) return;
      for (int a = last; a > 0; a--) {
        offset += operand.strides[a - 1] - operand.strides[a] * block_.sizes[a];
        index[a] = 0;
        if (++index[a - 1] < block_.sizes[a - 1]) break;
      }
    }
  }

  // The operand's numbers of the tile, if they stand together as T and whole vectors of them may be touched.
  template <class T = float>
  T* in_place(const BlockOperand& operand) const {
    const Type type = sizeof(T) == sizeof(float) ? Type::f32 : Type::bf16;
    if (operand.type != type || operand.inner != 1 || count_ % V::width != 0 || !together(operand)) return nullptr;
    int64_t offset = 0;
    for (int a = 0; a < block_.axes; a++) offset += index_[a] * operand.strides[a];
    if (operand.rows) offset = operand.rows[offset] * operand.table_row;
    return reinterpret_cast<T*>(operand.data) + from_ + offset;
  }

  // Writes past the caches where that pays and the address allows it.
  bool streams(const void* at) const { return block_.streams && reinterpret_cast<uintptr_t>(at) % V::streamed == 0; }

  // An input -> `width` numbers of each row, one row after the other.
  void gather(const BlockOperand& operand, float* to, int64_t width) const {
    if (operand.type == Type::f32) gather_as<float>(operand, to, width, [](float v) { return v; });
    else if (operand.type == Type::bf16) gather_as<uint16_t>(operand, to, width, from_bits);
    else gather_as<uint8_t>(operand, to, width, [](uint8_t v) { return static_cast<float>(v); });
  }

  // The reverse, to an output.
  void scatter(const BlockOperand& operand, const float* from, int64_t width) const {
    if (operand.type == Type::f32) scatter_as<float>(operand, from, width, [](float v) { return v; });
    else if (operand.type == Type::bf16) scatter_as<uint16_t>(operand, from, width, to_bits);
    else scatter_as<uint8_t>(operand, from, width, [](float v) { return static_cast<uint8_t>(v != 0.0f); });
  }

  const Block& block_;
  int64_t rows_ = 0, from_ = 0, width_ = 0, count_ = 0;

 private:
  // Whether the operand's rows of the tile follow each other in memory.
  bool together(const BlockOperand& operand) const {
    if (rows_ == 1) return true;
    const int last = block_.axes - 1;
    if (operand.rows || operand.strides[last] != width_) return false;
    bool follows = true;  // also where an index of an outer axis ends
    for (int a = 0; a < last; a++) follows &= operand.strides[a] == operand.strides[a + 1] * block_.sizes[a + 1];
    return follows || index_[last] + rows_ <= block_.sizes[last];
  }

  static float from_bits(uint16_t bits) {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  static uint16_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t even = bits + 0x7fff + (bits >> 16 & 1);
    return static_cast<uint16_t>((value == value ? even : bits | 0x400000) >> 16);
  }

  template <class T, class Read>
  void gather_as(const BlockOperand& operand, float* to, int64_t width, const Read& read) const {
    const T* from = reinterpret_cast<const T*>(operand.data);
    const int64_t inner = operand.inner;
    if (width == 1) return each_row(operand, [&](int64_t r, int64_t offset) { to[r] = read(from[offset]); });
    each_row(operand, [&](int64_t r, int64_t offset) {
      const T* x = from + offset;
      float* y = to + r * width;
      int64_t i = 0;
      if (inner == 1) {
        if constexpr (sizeof(T) > 1)
          for (; i + V::width <= width; i += V::width) V::store_unaligned(y + i, V::load_unaligned(x + i));
        for (; i < width; i++) y[i] = read(x[i]);
      } else if (inner == 0) {
        const float value = read(*x);
        for (; i < width; i++) y[i] = value;
      } else {
        if constexpr (sizeof(T) > 1)
          if (inner == 2)  // two parts alternate; behind the last number of one there may be no memory
            for (; i + V::width < width; i += V::width)
              V::store_unaligned(y + i, V::evens(V::load_unaligned(x + 2 * i), V::load_unaligned(x + 2 * i + V::width)));
        for (; i < width; i++) y[i] = read(x[i * inner]);
      }
    });
  }

  template <class T, class Write>
  void scatter_as(const BlockOperand& operand, const float* from, int64_t width, const Write& write) const {
    T* to = reinterpret_cast<T*>(operand.data);
    const int64_t inner = operand.inner;
    if (width == 1) return each_row(operand, [&](int64_t r, int64_t offset) { to[offset] = write(from[r]); });
    each_row(operand, [&](int64_t r, int64_t offset) {
      const float* x = from + r * width;
      T* y = to + offset;
      int64_t i = 0;
      if (inner == 1) {
        if constexpr (sizeof(T) > 1) {
          if (streams(y))
            for (; i + V::width <= width; i += V::width) V::stream(y + i, V::load_unaligned(x + i));
          for (; i + V::width <= width; i += V::width) V::store_unaligned(y + i, V::load_unaligned(x + i));
        }
        for (; i < width; i++) y[i] = write(x[i]);
      } else {
        for (; i < width; i++) y[i * inner] = write(x[i]);
      }
    });
  }

  int64_t index_[twofour::kOuterAxes] = {};
};

}  // namespace
