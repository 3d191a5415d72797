// A normalisation beside a product, of the rows that it reads or writes: its operands, checked, and what the product calls.
#pragma once

#include <cstring>

#include "native/operand.h"
#include "native/table.h"
#include "row_norm.h"

namespace twofour {

struct NormedRows {
  Norm norm{};
  const NormKernel* kernel = nullptr;
  Numbers factors, offsets;  // what the norm reads: they may be copies

  // `index`: a row of the table of norms, of `from`'s type; weight and bias as of `norm`. The answer goes to `to`.
  NormedRows() = default;
  NormedRows(const Border& border, int index, const Rows& from, const Operand& scale, const Operand& shift, void* to,
             float eps, bool centred)
      : kernel(&norm_kernel(index)),
        factors(border.numbers(scale, "weight of the norm", from.width)),
        offsets(border.numbers(shift, "bias of the norm", from.width)) {
    const bool bf16 = from.type == Type::bf16;
    if (std::strcmp(kernel->dtype, bf16 ? "bfloat16" : "float32") != 0)
      throw std::invalid_argument("no norm of rows of this type");
    norm = {from.data, from.stride, factors.data(), offsets.data(), to, bf16, from.rows, from.width, eps, centred};
  }
  NormedRows(const NormedRows&) = delete;  // `norm` points into it
  NormedRows& operator=(const NormedRows&) = delete;
};

}  // namespace twofour
