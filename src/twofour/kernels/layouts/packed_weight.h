// A packed weight as it came through the border: its header read, and its sizes held against the bytes that are there.
#pragma once

#include <cstring>
#include <string>

#include "layout.h"
#include "header.h"
#include "native/operand.h"

namespace twofour {

class PackedWeight {
 public:
  // uint8, contiguous, on a 64-byte boundary (kernels load whole vectors), at least a header.
  PackedWeight(const Border& border, const Operand& operand, const char* role = "weight")
      : border_(border), operand_(operand), role_(role) {
    const View view = border.dense(operand, role, {Type::u8});
    data_ = view.data;
    size_ = view.count();
    border.require(size_ >= static_cast<int64_t>(sizeof(LayoutHeader)), operand, role, "a header of 64 bytes");
    if (reinterpret_cast<uintptr_t>(data_) % 64 != 0)
      border.refuse(operand, role, "bytes that start at a multiple of 64", "copy them: weight.clone()");
  }
  const LayoutHeader& head() const { return *reinterpret_cast<const LayoutHeader*>(data_); }
  char* bytes() const { return data_ + sizeof(LayoutHeader); }
  bool made_for(const char* dtype, const char* layout, int64_t out, int64_t in) const {
    return head().made_for(dtype, layout, out, in);
  }
  int64_t group() const { return head().group & ~kZerosBit; }
  bool zeros() const { return (head().group & kZerosBit) != 0; }
  WeightShape shape() const { return {head().rows, head().columns, group(), zeros()}; }

  // What holds of every header that packing writes, and that the bytes behind it are as many as the layout says.
  void require_size(const Layout& layout) const {
    require_sound(sizes() && head().columns % 4 == 0 && layout.bytes(shape()) == behind());
  }
  void require_sound(bool sound) const {
    if (!sound) border_.refuse(operand_, role_, "as many bytes as its header says", "prepare or load the weight again");
  }
  // Sizes that cannot overflow in the arithmetic of a layout: the tersest holds 4 weights a byte.
  bool sizes() const {
    int64_t count;
    const bool whole = std::strncmp(head().dtype, "int4", sizeof(LayoutHeader::dtype)) == 0;
    const bool grouped = whole ? group() == 32 || group() == 64 || group() == 128 : head().group == 0;
    return grouped && head().rows > 0 && head().columns > 0 &&
           !__builtin_mul_overflow(head().rows, head().columns, &count) && count / 4 <= size_;
  }
  // The same of a layout without groups that holds at most so many weights in a byte.
  bool sizes_at_most(int64_t per_byte) const {
    int64_t count;
    return head().rows > 0 && head().columns > 0 && !__builtin_mul_overflow(head().rows, head().columns, &count) &&
           count / per_byte <= size_;
  }
  int64_t behind() const { return size_ - static_cast<int64_t>(sizeof(LayoutHeader)); }

 private:
  const Border& border_;
  const Operand& operand_;
  const char* role_;
  char* data_;
  int64_t size_;
};

}  // namespace twofour
