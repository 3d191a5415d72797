// What a product is handed beside its weight, sparse or dense: checked at the border and put into one call.
#pragma once

#include <cstring>

#include "matmul.h"
#include "layouts/packed_weight.h"
#include "native/scratch.h"

namespace twofour {

constexpr Types kInt8Reads{Type::f32, Type::bf16, Type::u8};
constexpr Types kInt8Writes{Type::f32, Type::bf16, Type::u8, Type::s8};

// The types of x that rows of a computing type read.
inline Types reads(const char* dtype) { return std::strcmp(dtype, "float32") == 0 ? Types{Type::f32} : kReal; }

// Elements behind the inputs and the outputs of a row that are none.
struct Behind {
  int64_t x = 0, y = 0;
};

struct ProductOperands {
  Rows from, to;
  Numbers bias;
  Epilogue epilogue;

  // x (..., in) of one of `reads`; y (..., out), contiguous, of one of `writes` (none: of x's type); `other` as y,
  // float32 where that is of whole numbers, or None where `codes` (activation, combine) combine nothing.
  ProductOperands(const Border& border, const Operand& x, const Operand& given_bias, const Operand& y, Types reads,
                  Types writes, const int (&codes)[2], const Operand& other, Behind behind = {})
      : from(without(border.rows(x, "input", reads), behind.x)),
        to(without(border.rows(y, "answer", writes.has(Type::f32) ? writes : Types{from.type}), behind.y)),
        bias(border.numbers(given_bias, "bias", to.width)) {
    border.require(from.width >= 0, x, "input", "as wide as its mark");
    border.require(to.rows == from.rows && to.width >= 0 && (to.stride == to.width + behind.y || to.rows <= 1), y, "answer",
                   "contiguous, as many rows as the input");
    if (codes[0] < 0 || codes[0] > static_cast<int>(Activation::silu) || codes[1] < 0 ||
        codes[1] > static_cast<int>(Combine::multiply))
      throw std::invalid_argument("no such epilogue");
    epilogue = {static_cast<Activation>(codes[0]), static_cast<Combine>(codes[1]), nullptr, 0};
    if (epilogue.combine == Combine::none) return;
    const Type type = to.type == Type::bf16 ? Type::bf16 : Type::f32;
    const Rows second = border.rows(other, "second operand", {type});
    border.require(second.rows == to.rows && second.width == to.width, other, "second operand", "the answer's shape");
    epilogue.other = second.data;
    epilogue.other_stride = second.stride;
  }

  Matmul call(const PackedWeight& packed, const Quantization& quantization, int threads) const {
    return {from.data, from.type, from.stride, packed.bytes(), bias.data(), to.data, to.type, to.stride,
            from.rows, to.width, from.width, packed.group(), packed.zeros(), epilogue, quantization, threads,
            nullptr, nullptr};
  }

 private:
  static Rows without(Rows rows, int64_t behind) {
    rows.width -= behind;
    return rows;
  }
};

// What a call says of whole numbers; rows of other computing types ignore it.
struct WholeRange {
  bool whole;
  Quantization quantization;

  WholeRange(const char* dtype, const Quantization& given)
      : whole(std::strcmp(dtype, "int8") == 0), quantization(given) {}
  Types reads(const char* dtype) const { return whole ? kInt8Reads : twofour::reads(dtype); }
  Types writes() const { return whole ? kInt8Writes : Types{}; }
  void require(const Border& border, Type type, const Operand& x, const Operand& weight) const {
    if (!whole) return;
    const Quantization& q = quantization;
    border.require(type != Type::u8 || !q.dynamic, x, "input", "a static range for an input of torch.uint8");
    border.require((q.dynamic || (0 <= q.x_zero && q.x_zero <= 255)) && -128 <= q.y_zero && q.y_zero <= 255, weight,
                   "weight", "zero points of bytes: from 0 to 255 of the input, from -128 to 255 of the answer");
  }
};

// Runs a call whose operands have passed the border, in scratch memory of its table's own.
template <class Kernel>
void run_product(const Border& border, const Kernel& kernel, Matmul args) {
  static Scratch scratch;
  bool damaged = false;
  args.damaged = &damaged;
  {
    const Unlocked unlocked;
    const Scratch::Lease lease(scratch, static_cast<size_t>(kernel.workspace_bytes(args)));
    args.workspace = lease.data();
    kernel.run(args);
  }
  if (damaged) border.damaged();
}

}  // namespace twofour
