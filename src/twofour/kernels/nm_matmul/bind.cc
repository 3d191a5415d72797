// Products by packed weights for Python: the table of kernels, the layouts, the call.
#include <cstring>
#include <string>

#include "kernels/layouts/kept.h"
#include "kernels/layouts/octets.h"
#include "native/binding.h"
#include "native/parallel.h"
#include "native/integers.h"
#include "nm_matmul.h"
#include "kernels/layouts/packed_weight.h"
#include "kernels/product_operands.h"
#include "kernels/products.h"

namespace twofour {
namespace {

const Layout& layout_of(const std::string& name) {
  const Layout* layout = layout_called(name.c_str());
  if (layout == nullptr) throw std::invalid_argument("no such layout");
  return *layout;
}

// The layout that a packed weight's header names; its sizes are those of the bytes.
const Layout& layout_of(const PackedWeight& packed) {
  const LayoutHeader& head = packed.head();
  const Layout* layout = layout_called(std::string(head.layout, strnlen(head.layout, sizeof head.layout)).c_str());
  packed.require_sound(layout != nullptr && packed.made_for(layout->dtype, layout->name, head.rows, head.columns));
  packed.require_size(*layout);
  return *layout;
}

// Rows are shared among the threads in whole blocks.
void refill(const Layout& kind, const PackedWeight& to, const ValueSource& from, int threads) {
  const WeightShape shape = to.shape();
  const Unlocked unlocked;
  parallel_for(ceil_div(shape.out, kRefillRows), 1, threads, [&](int64_t begin, int64_t end) {
    kind.refill(shape, from, begin * kRefillRows, least(end * kRefillRows, shape.out), to.bytes());
  });
}

void bind_refill(nb::module_& m) {
  m.def("layout_refills", [](const std::string& layout) { return layout_of(layout).refill != nullptr; });
  // `from` is the weight as kernels see it, or its transpose in memory.
  m.def("layout_refill", [](const Operand& packed, const Operand& from, int threads) {
    const Border border("layout_refill");
    const PackedWeight to(border, packed, "packed weight");
    const Layout& kind = layout_of(to);
    border.require(kind.refill != nullptr, packed, "packed weight", "a layout whose values can be written anew in place");
    const WeightShape shape = to.shape();
    const View weight = border.strided(from, "weight", kReal);
    border.require(weight.ndim == 2 && weight.shape[0] == shape.out && weight.shape[1] == shape.in &&
                       least(weight.strides[0], weight.strides[1]) == 1,
                   from, "weight", "the packed weight's shape, one of its axes contiguous");
    refill(kind, to, {weight.data, weight.type == Type::bf16, weight.strides[0], weight.strides[1], nullptr}, threads);
  });
  // The same from the canonical form of the weight, or, turned, of its transpose.
  m.def("layout_refill_kept", [](const Operand& packed, const Operand& values, const Operand& indices, bool turned,
                                 int threads) {
    const Border border("layout_refill_kept");
    const PackedWeight to(border, packed, "packed weight");
    const Layout& kind = layout_of(to);
    border.require(kind.refill != nullptr, packed, "packed weight", "a layout whose values can be written anew in place");
    const WeightShape shape = to.shape();
    const int64_t rows = turned ? shape.in : shape.out, columns = turned ? shape.out : shape.in;
    border.require(columns % 4 == 0, packed, "packed weight", "of a transpose, outputs in groups of four");
    const View kept = border.exactly(values, "kept values", kReal, rows * (columns / 2));
    const View codes = border.exactly(indices, "indices", {Type::u8}, rows * ceil_div(columns, 8));
    refill(kind, to, {kept.data, kept.type == Type::bf16, turned ? 1 : columns / 2, turned ? columns / 2 : 1,
                      reinterpret_cast<const uint8_t*>(codes.data)}, threads);
  });
}

// Moves kept values out of a dense weight (gather) or into one, whose other values become zero (scatter).
void move_kept(const char* name, bool scatter, const Operand& dense, const Operand& indices, const Operand& values,
               int threads) {
  const Border border(name);
  const Rows rows = border.rows(dense, "dense weight", kReal);
  border.require(rows.width % 4 == 0, dense, "dense weight", "groups of four: a last size that is a multiple of 4");
  const View codes = border.exactly(indices, "indices", {Type::u8}, rows.rows * ceil_div(rows.width, 8));
  const View kept = border.exactly(values, "kept values", {rows.type}, rows.rows * (rows.width / 2));
  const Unlocked unlocked;
  const auto move = [&](auto* of_type) {
    using T = std::remove_pointer_t<decltype(of_type)>;
    const KeptRows<T> all{reinterpret_cast<T*>(rows.data), rows.stride, rows.width,
                          reinterpret_cast<const uint8_t*>(codes.data), reinterpret_cast<T*>(kept.data)};
    parallel_for(rows.rows, 1, threads, [&](int64_t begin, int64_t end) {
      if (scatter) all.scatter(begin, end);
      else all.gather(begin, end);
    });
  };
  if (rows.type == Type::bf16) move(static_cast<uint16_t*>(nullptr));
  else move(static_cast<uint32_t*>(nullptr));
}

void bind_kept(nb::module_& m) {
  m.def("kept_gather", [](const Operand& dense, const Operand& indices, const Operand& values, int threads) {
    move_kept("kept_gather", false, dense, indices, values, threads);
  });
  m.def("kept_scatter", [](const Operand& values, const Operand& indices, const Operand& dense, int threads) {
    move_kept("kept_scatter", true, dense, indices, values, threads);
  });
}

// The canonical form of a packed weight, each part of the size that its header implies.
struct Parts {
  View values, indices;
  Numbers scales, zeros;

  Parts(const Border& border, const Layout& layout, const WeightShape& shape, const Operand (&given)[4])
      : values(border.exactly(given[0], "values", {value_type(layout)}, shape.out * (shape.in / (int4(layout) ? 4 : 2)))),
        indices(border.exactly(given[1], "indices", {Type::u8}, shape.out * ceil_div(shape.in, 8))) {
    const bool whole = value_type(layout) == Type::s8;  // whole numbers without scales stand for themselves
    const int64_t runs = shape.group ? ceil_div(shape.in, shape.group) : 1;
    border.require(whole || given[2].given() == int4(layout), given[2], "scales", int4(layout) ? "scales" : "None");
    border.require(given[3].given() == shape.zeros, given[3], "zero points", shape.zeros ? "zero points" : "None");
    for (int i = 2; i < 4; i++)
      if (given[i].given()) border.exactly(given[i], i == 2 ? "scales" : "zero points", {Type::f32}, shape.out * runs);
    scales = border.numbers(given[2], "scales", shape.out * runs);
    zeros = border.numbers(given[3], "zero points", shape.out * runs);
  }
  static bool int4(const Layout& layout) { return std::strcmp(layout.dtype, "int4") == 0; }
  static Type value_type(const Layout& layout) {
    if (std::strcmp(layout.dtype, "float32") == 0) return Type::f32;
    if (std::strcmp(layout.dtype, "bfloat16") == 0) return Type::bf16;
    return int4(layout) ? Type::u8 : Type::s8;
  }
};

void bind_layouts(nb::module_& m) {
  bind_refill(m);
  bind_kept(m);
  m.def("layout_dtype", [](const std::string& layout) { return std::string(layout_of(layout).dtype); });
  m.def("layout_bytes", [](const std::string& layout, int64_t rows, int64_t columns, int64_t group, bool zeros) {
    return layout_of(layout).bytes({rows, columns, group, zeros});
  });
  // `packed`: a header that says what is wanted, and the bytes to be written behind it.
  m.def("layout_pack", [](const Operand& packed, const Operand& values, const Operand& indices, const Operand& scales,
                          const Operand& zeros) {
    const Border border("layout_pack");
    const PackedWeight to(border, packed, "packed weight");
    const Layout& kind = layout_of(to);
    const Parts parts(border, kind, to.shape(), {values, indices, scales, zeros});
    const Unlocked unlocked;
    kind.pack(to.shape(), {parts.values.data, reinterpret_cast<const uint8_t*>(parts.indices.data), parts.scales.data(),
                           parts.zeros.data()}, to.bytes());
  });
  m.def("layout_unpack", [](const Operand& packed, const Operand& values, const Operand& indices, const Operand& scales,
                            const Operand& zeros) {
    const Border border("layout_unpack");
    const PackedWeight from(border, packed, "packed weight");
    const Layout& kind = layout_of(from);
    const Parts parts(border, kind, from.shape(), {values, indices, scales, zeros});
    border.require(Parts::value_type(kind) != Type::s8 || scales.given(), scales, "scales", "room for the scales of rows");
    const Unlocked unlocked;
    kind.unpack(from.shape(), from.bytes(), {parts.values.data, reinterpret_cast<uint8_t*>(parts.indices.data),
                                             const_cast<float*>(parts.scales.data()),
                                             const_cast<float*>(parts.zeros.data())});
  });
}

const NmMatmulKernel& kernel_at(int index) {
  return row(kNmMatmulKernels, static_cast<size_t>(kNmMatmulKernelCount), index);
}

void bind_columns(nb::module_& m) {
  // y (out, tokens) = W x, x (in, tokens): as nm_matmul with both transposed. Types are float32 or bfloat16.
  m.def("nm_matmul_columns", [](int index, const Operand& x, const Operand& weight, const Operand& y, int threads) {
    const NmMatmulKernel& kernel = kernel_at(index);
    const Border border(kernel.name);
    const Types types = std::strcmp(kernel.dtype, "float32") == 0 ? Types{Type::f32} : kReal;
    const Rows from = border.rows(x, "input", types), to = border.rows(y, "answer", types);
    const PackedWeight packed(border, weight);
    if (!kernel.order->columns || !packed.made_for(kernel.dtype, kernel.layout, to.rows, from.rows)) return false;
    packed.require_size(*kernel.order);
    border.require(to.width == from.width && (to.stride == to.width || to.rows == 1), y, "answer",
                   "contiguous, as many columns as the input");
    run_product(border, kernel, {from.data, from.type, from.stride, packed.bytes(), nullptr, to.data, to.type, to.stride,
                         from.width, to.rows, from.rows, 0, false, {Activation::none, Combine::none, nullptr, 0},
                         {true, 0, 0, 0, 0}, threads, nullptr, nullptr, true});
    return true;
  });
}

}  // namespace

void bind_nm_matmul(nb::module_& m) {
  bind_layouts(m);
  bind_table(m, kNmMatmulKernels, static_cast<size_t>(kNmMatmulKernelCount));
  add_products(m, kNmMatmulKernels, static_cast<size_t>(kNmMatmulKernelCount), [](const RowBase& row, const PackedWeight& packed) {
    packed.require_size(layout_of(row.layout));
  });
  // Returns false, without touching y, when `weight` was made for another layout or shape. y is contiguous.
  bind_call(m, "nm_matmul", +[](RowOf<NmMatmulKernel> index, const Operand& x, const Operand& weight, const Operand& bias, const Answer& y,
                        int activation, int combine, const Operand& other, bool dynamic, float x_scale, int x_zero,
                        float y_scale, int y_zero, Threads threads) {
    const NmMatmulKernel& kernel = kernel_at(index);
    const Border border(kernel.name);
    const WholeRange range(kernel.dtype, {dynamic, x_scale, x_zero, y_scale, y_zero});
    const ProductOperands seen(border, x, bias, y, range.reads(kernel.dtype), range.writes(), {activation, combine}, other);
    const PackedWeight packed(border, weight);
    if (!packed.made_for(kernel.dtype, kernel.layout, seen.to.width, seen.from.width)) return false;
    packed.require_size(*kernel.order);
    range.require(border, seen.from.type, x, weight);
    run_product(border, kernel, seen.call(packed, range.quantization, threads));
    return true;
  });
  bind_columns(m);
}

}  // namespace twofour
