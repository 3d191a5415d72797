// Dense products for Python: the table of kernels, the packing, the call.
#include "dense_matmul.h"
#include "kernels/layouts/int4.h"
#include "mlp.h"
#include "kernels/product_operands.h"
#include "kernels/products.h"
#include "kernels/row_norm.h"
#include "native/binding.h"
#include "native/scratch.h"
#include "native/integers.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr DenseMatmulKernel kDenseMatmulKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "dense_matmul", __VA_ARGS__}, symbol##__workspace, symbol},
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

// The normalisation that follows a product, or stands before it.
struct NormedRows {
  Norm norm;
  const NormKernel* kernel;
  Numbers factors, offsets;  // what the norm reads: they may be copies

  static void run(const void* state, int64_t begin, int64_t end) {
    const auto& self = *static_cast<const NormedRows*>(state);
    self.kernel->run(self.norm, begin, end);
  }
};

NormedRows normed_rows(const Border& border, int index, const Rows& from, const Operand& scale, const Operand& shift,
                       float* to, float eps, bool centred) {
  NormedRows rows{{from.data, from.stride, nullptr, nullptr, to, false, from.rows, from.width, eps, centred},
                  &norm_kernel(index),
                  border.numbers(scale, "weight of the norm", from.width),
                  border.numbers(shift, "bias of the norm", from.width)};
  if (std::strcmp(rows.kernel->dtype, "float32") != 0) throw nb::value_error("no norm of float32 rows");
  rows.norm.weight = rows.factors.data(), rows.norm.bias = rows.offsets.data();
  return rows;
}

// Returns false, without touching y, when `weight` was made for another layout or shape. y is contiguous. `normed` is
// what is done with rows of y, `before` with rows of x, into memory of this call.
bool multiply(const Border& border, int index, const ProductOperands& seen, const Operand& weight, int threads,
              const NormedRows* normed = nullptr, NormedRows* before = nullptr) {
  static Scratch scratch;
  const DenseMatmulKernel& kernel = row(kDenseMatmulKernels, index);
  const PackedWeight packed(border, weight);
  if (!packed.made_for(kernel.dtype, kernel.layout, seen.to.width, seen.from.width)) return false;
  const bool floats = std::strcmp(kernel.dtype, "float32") == 0;
  require_row(kernel, packed);
  if ((normed || before) && !floats) throw nb::value_error("the rows of int4 weights do not begin or end in a norm");
  Matmul args = seen.call(packed, {}, threads);
  if (normed) args.rows_done = NormedRows::run, args.rows_state = normed;
  nb::gil_scoped_release release;
  const Scratch::Lease lease(scratch, static_cast<size_t>(kernel.workspace_bytes(args)));
  args.workspace = lease.data();
  const size_t copy = before ? static_cast<size_t>(args.tokens * args.in_features * 4) : 0;
  const Scratch::Lease rows(scratch, copy);
  if (before) {
    before->norm.y = rows.data();
    args.x = rows.data(), args.x_stride = args.in_features;
    args.rows_wanted = NormedRows::run, args.wanted_state = before;
  }
  kernel.run(args);
  return true;
}

// A float32 weight with its bias: `seen` are its operands.
bool made_for_floats(const DenseMatmulKernel& kernel, const PackedWeight& packed, int64_t out, int64_t in) {
  if (std::strcmp(kernel.dtype, "float32") != 0) throw nb::value_error("two products in a row are of float32 weights");
  if (!packed.made_for(kernel.dtype, kernel.layout, out, in)) return false;
  require_floats(packed);
  return true;
}

// A product into memory of the call, of which there is no tensor.
Matmul inner(const Rows& from, const PackedWeight& packed, const Numbers& bias, int64_t out, Activation activation,
             Combine combine, int threads) {
  return {from.data, from.type, from.stride, packed.bytes(), bias.data(), nullptr, Type::f32, out,
          from.rows, out, from.width, packed.group(), packed.zeros(), {activation, combine, nullptr, 0}, {}, threads,
          nullptr, nullptr};
}

}  // namespace

void bind_dense_matmul(nb::module_& m) {
  bind_table(m, kDenseMatmulKernels);
  add_products(m, kDenseMatmulKernels, std::size(kDenseMatmulKernels), require_row);
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
  // The same with a normalisation of each row of y in float32, into `normed`, which may be y.
  bind_call(m, "dense_matmul_normed",
            +[](int index, const Operand& x, const Operand& weight, const Operand& bias, const Answer& y, int activation, int combine,
                const Operand& other, int norm, const Operand& scale, const Operand& shift, const Answer& normed, float eps,
                bool centred, int threads) {
    const Border border(row(kDenseMatmulKernels, index).name);
    const ProductOperands seen(border, x, bias, y, {Type::f32}, {}, {activation, combine}, other);
    const View to = border.exactly(normed, "normalised answer", {Type::f32}, seen.to.rows * seen.to.width);
    const NormedRows rows = normed_rows(border, norm, seen.to, scale, shift, reinterpret_cast<float*>(to.data), eps, centred);
    return multiply(border, index, seen, weight, threads, &rows);
  });
  // The product of normalised rows of x, in float32.
  bind_call(m, "dense_matmul_of_normed",
            +[](int index, const Operand& x, const Operand& weight, const Operand& bias, const Answer& y, int activation, int combine,
                const Operand& other, int norm, const Operand& scale, const Operand& shift, float eps, bool centred,
                int threads) {
    const Border border(row(kDenseMatmulKernels, index).name);
    const ProductOperands seen(border, x, bias, y, {Type::f32}, {}, {activation, combine}, other);
    NormedRows rows = normed_rows(border, norm, seen.from, scale, shift, nullptr, eps, centred);
    return multiply(border, index, seen, weight, threads, nullptr, &rows);
  });
  // y = epilogue(last(activation(first(x)) [* gate(x)])), float32, by strips of tokens; `gate` may be None. `activation` is
  // of `first`, `combine` and `other` belong to `last`. `before` and `after`: rows of the table of norms, of rows of x and of
  // rows of y, which `normed` takes and may be; -1 for none.
  bind_call(m, "dense_mlp",
            +[](int index, const Operand& x, const Operand& first, const Operand& first_bias, const Operand& gate,
                const Operand& gate_bias, const Operand& last, const Operand& last_bias, const Answer& y, int64_t hidden,
                int activation, int combine, const Operand& other, int before, const Operand& before_scale,
                const Operand& before_shift, float before_eps, bool before_centred, int after, const Operand& after_scale,
                const Operand& after_shift, float after_eps, bool after_centred, const Answer& normed, int threads) {
    static Scratch scratch;
    const DenseMatmulKernel& kernel = row(kDenseMatmulKernels, index);
    const Border border(kernel.name);
    const ProductOperands seen(border, x, last_bias, y, {Type::f32}, {}, {0, combine}, other);
    if (activation < 0 || activation > static_cast<int>(Activation::silu)) throw nb::value_error("no such epilogue");
    if (hidden < 1) throw nb::value_error("nothing between two products");
    const bool gated = gate.given();
    const PackedWeight one(border, first), two(border, gated ? gate : first), three(border, last);
    const int64_t in = seen.from.width, out = seen.to.width;
    if (!made_for_floats(kernel, one, hidden, in) || !made_for_floats(kernel, two, hidden, in) ||
        !made_for_floats(kernel, three, out, hidden))
      return false;
    const Numbers one_bias = border.numbers(first_bias, "bias", hidden), two_bias = border.numbers(gate_bias, "bias", hidden);
    Mlp mlp{inner(seen.from, one, one_bias, hidden, static_cast<Activation>(activation),
                  gated ? Combine::multiply : Combine::none, threads),
            inner(seen.from, two, two_bias, hidden, Activation::none, Combine::none, threads),
            seen.call(three, {}, threads), gated, nullptr, nullptr, {}, {}};
    mlp.last.in_features = hidden;
    NormedRows ahead, behind;
    if (before >= 0) {
      ahead = normed_rows(border, before, seen.from, before_scale, before_shift, nullptr, before_eps, before_centred);
      ahead.norm.weight = ahead.factors.data(), ahead.norm.bias = ahead.offsets.data();
      mlp.before = ahead.kernel, mlp.before_rows = ahead.norm;
    }
    if (after >= 0) {
      const View to = border.exactly(normed, "normalised answer", {Type::f32}, seen.to.rows * seen.to.width);
      behind = normed_rows(border, after, seen.to, after_scale, after_shift, reinterpret_cast<float*>(to.data), after_eps,
                           after_centred);
      behind.norm.weight = behind.factors.data(), behind.norm.bias = behind.offsets.data();
      mlp.after = behind.kernel, mlp.after_rows = behind.norm;
    }
    nb::gil_scoped_release release;
    run_mlp(kernel, mlp, scratch);
    return true;
  });
}

}  // namespace twofour
