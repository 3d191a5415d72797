// Dense products for Python: the table of kernels, the packing, the calls.
#include <algorithm>
#include <cstring>

#include "dense_matmul.h"
#include "kernels/layouts/int4.h"
#include "kernels/product_operands.h"
#include "kernels/products.h"
#include "native/binding.h"
#include "native/integers.h"
#include "native/parallel.h"

namespace twofour {
namespace {

constexpr DenseMatmulKernel kDenseMatmulKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{{#symbol, "dense_matmul", __VA_ARGS__}, symbol##__workspace, symbol}},
#include "dense_matmul.inc"
#undef TWOFOUR_ROW
};

constexpr int64_t kLongestWhole = int64_t{1} << 16;  // inputs of whole numbers: 2^16 products of 255 x 127 fit int32

// A header that packing writes, and as many bytes behind it as it says.
void require_int4(const PackedWeight& packed) {
  packed.require_sound(packed.sizes() && packed.group() != 0);
  const WeightShape shape = packed.shape();
  packed.require_sound(int4_dense_layout__bytes(shape.out, shape.in, shape.group, shape.zeros) == packed.behind());
}

// The bytes behind the header of a weight in panels: each row's values filled up to whole dwords, of whole numbers its scale
// and sum besides, and so few that int32 holds the sum of their products (255 x 127 each).
void require_panels(const char* dtype, const PackedWeight& packed) {
  const WeightShape shape = packed.shape();
  const bool real = std::strcmp(dtype, "float32") == 0, whole = std::strcmp(dtype, "int8") == 0;
  const int64_t per = real ? 1 : whole ? 4 : 2;
  packed.require_sound(packed.sizes() && round_up(shape.out, kDensePanel) * 4 *
                       (ceil_div(shape.in, per) + (whole ? 2 : 0)) == packed.behind() && (!whole || shape.in <= kLongestWhole));
}

void require_row(const RowBase& row, const PackedWeight& packed) {
  std::strcmp(row.dtype, "int4") == 0 ? require_int4(packed) : require_panels(row.dtype, packed);
}

}  // namespace

void bind_dense_matmul(nb::module_& m) {
  bind_table(m, kDenseMatmulKernels);
  add_products(m, kDenseMatmulKernels, std::size(kDenseMatmulKernels), require_row,
               [](const RowBase& row) { return std::strcmp(row.dtype, "float32") == 0; });
  m.attr("dense_panel") = kDensePanel;
  m.attr("dense_longest_whole") = kLongestWhole;
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
    const Unlocked unlocked;
    int4_dense_layout__pack(reinterpret_cast<const uint8_t*>(halves.data), steps, offsets, shape.out, shape.in,
                            shape.group, to.bytes());
  });
  // Returns false, without touching y, when `weight` was made for another layout or shape. y is contiguous.
  bind_call(m, "dense_matmul", +[](RowOf<DenseMatmulKernel> index, const Operand& x, const Operand& weight, const Operand& bias, const Answer& y,
                                   int activation, int combine, const Operand& other, bool dynamic, float x_scale,
                                   int x_zero, float y_scale, int y_zero, Threads threads) {
    const DenseMatmulKernel& kernel = row(kDenseMatmulKernels, index);
    const Border border(kernel.name);
    const WholeRange range(kernel.dtype, {dynamic, x_scale, x_zero, y_scale, y_zero});
    const ProductOperands seen(border, x, bias, y, range.reads(kernel.dtype), range.writes(), {activation, combine}, other);
    const PackedWeight packed(border, weight);
    if (!packed.made_for(kernel.dtype, kernel.layout, seen.to.width, seen.from.width)) return false;
    require_row(kernel, packed);
    range.require(border, seen.from.type, x, weight);
    run_product(border, kernel, seen.call(packed, range.quantization, threads));
    return true;
  });
  // to[i] = row places[i] of a weight in panels, of its own numbers. Returns false, without touching `to`, as above.
  bind_call(m, "dense_rows", +[](RowOf<DenseMatmulKernel> index, const Operand& weight, const Operand& places, const Answer& to,
                                 Threads threads) {
    const DenseMatmulKernel& kernel = row(kDenseMatmulKernels, index);
    const Border border("dense_rows");
    const PackedWeight packed(border, weight);
    const bool real = std::strcmp(kernel.dtype, "float32") == 0, whole = std::strcmp(kernel.dtype, "int8") == 0;
    const Rows answer = border.rows(to, "answer", {real ? Type::f32 : whole ? Type::s8 : Type::bf16});
    const View order = border.dense(places, "places", {Type::s64});
    const int64_t rows = packed.shape().out, size = real ? 4 : whole ? 1 : 2, bytes = answer.width * size;
    if (std::strcmp(kernel.dtype, "int4") == 0) return false;
    if (!packed.made_for(kernel.dtype, kernel.layout, rows, answer.width)) return false;
    require_panels(kernel.dtype, packed);
    border.require(answer.rows == order.count() && (answer.rows <= 1 || answer.stride >= answer.width), to, "answer",
                   "a row of the weight's type and width, in memory of its own, for each place");
    const auto* const place = reinterpret_cast<const int64_t*>(order.data);
    border.require(std::all_of(place, place + answer.rows, [&](int64_t p) { return 0 <= p && p < rows; }), places,
                   "places", "rows of the weight");
    const int64_t dwords = ceil_div(bytes, 4), beside = whole ? 2 : 0;
    const char* const panels = packed.bytes() + round_up(rows, kDensePanel) * beside * 4;
    const Unlocked unlocked;
    parallel_for(answer.rows, 16, threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const char* from = panels + (place[i] / kDensePanel * dwords * kDensePanel + place[i] % kDensePanel) * 4;
        char* const row = answer.data + i * answer.stride * size;
        for (int64_t at = 0; at < bytes; at += 4, from += kDensePanel * 4)
          std::memcpy(row + at, from, static_cast<size_t>(std::min(int64_t{4}, bytes - at)));
      }
    });
    return true;
  });
}

}  // namespace twofour
