// Dense products for Python: the table of kernels, the packing, the call.
#include "dense_matmul.h"
#include "kernels/layouts/int4.h"
#include "kernels/product_operands.h"
#include "kernels/products.h"
#include "native/binding.h"
#include "native/scratch.h"
#include "native/integers.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr DenseMatmulKernel kDenseMatmulKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{{#symbol, "dense_matmul", __VA_ARGS__}, symbol##__workspace, symbol}},
#include "dense_matmul.inc"
#undef TWOFOUR_ROW
};

// A header that packing writes, and as many bytes behind it as it says.
void require_int4(const PackedWeight& packed) {
  packed.require_sound(packed.sizes() && packed.group() != 0);
  const WeightShape shape = packed.shape();
  packed.require_sound(int4_dense_layout__bytes(shape.out, shape.in, shape.group, shape.zeros) == packed.behind());
}

// The bytes behind the header of a weight in float32: whole panels of 32 outputs.
void require_floats(const PackedWeight& packed) {
  const WeightShape shape = packed.shape();
  packed.require_sound(packed.sizes() && round_up(shape.out, 32) * shape.in * 4 == packed.behind());
}

void require_row(const RowBase& row, const PackedWeight& packed) {
  std::strcmp(row.dtype, "float32") == 0 ? require_floats(packed) : require_int4(packed);
}

// Returns false, without touching y, when `weight` was made for another layout or shape. y is contiguous.
bool multiply(const Border& border, int index, const ProductOperands& seen, const Operand& weight, int threads) {
  static Scratch scratch;
  const DenseMatmulKernel& kernel = row(kDenseMatmulKernels, index);
  const PackedWeight packed(border, weight);
  if (!packed.made_for(kernel.dtype, kernel.layout, seen.to.width, seen.from.width)) return false;
  require_row(kernel, packed);
  Matmul args = seen.call(packed, {}, threads);
  nb::gil_scoped_release release;
  const Scratch::Lease lease(scratch, static_cast<size_t>(kernel.workspace_bytes(args)));
  args.workspace = lease.data();
  kernel.run(args);
  return true;
}

}  // namespace

void bind_dense_matmul(nb::module_& m) {
  bind_table(m, kDenseMatmulKernels);
  add_products(m, kDenseMatmulKernels, std::size(kDenseMatmulKernels), require_row,
               [](const RowBase& row) { return std::strcmp(row.dtype, "float32") == 0; });
  m.def("dense_int4_bytes", int4_dense_layout__bytes);
  // `packed`: a header that says what is wanted, and the bytes to be written behind it.
  m.def("dense_int4_pack", [](const Operand& packed, const Operand& values, const Operand& scales, const Operand& zeros) {
    const Border border("dense_int4_pack");
    const PackedWeight to(border, packed, "packed weight");
    require_int4(to);
    const WeightShape shape = to.shape();
    const View halves = border.exactly(values, "values", {Type::u8}, shape.out * ceil_div(shape.in, 2));
    const int64_t runs = shape.out * ceil_div(shape.in, shape.group);
    const auto floats = [&](const Operand& part, const char* role) {
      return reinterpret_cast<const float*>(border.exactly(part, role, {Type::f32}, runs).data);
    };
    const float* steps = floats(scales, "scales");
    const float* offsets = shape.zeros ? floats(zeros, "zero points") : nullptr;
    nb::gil_scoped_release release;
    int4_dense_layout__pack(reinterpret_cast<const uint8_t*>(halves.data), steps, offsets, shape.out, shape.in,
                            shape.group, to.bytes());
  });
  bind_call(m, "dense_matmul", +[](int index, const Operand& x, const Operand& weight, const Operand& bias, const Answer& y,
                           int activation, int combine, const Operand& other, int threads) {
    const Border border(row(kDenseMatmulKernels, index).name);
    const Types types = reads(row(kDenseMatmulKernels, index).dtype);
    const ProductOperands seen(border, x, bias, y, types, {}, {activation, combine}, other);
    return multiply(border, index, seen, weight, threads);
  });
}

}  // namespace twofour
