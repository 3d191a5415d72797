// Products by weights of packed blocks for Python: the table of kernels, the sizes of the layout, the call.
#include "block_matmul.h"
#include "blocks.h"
#include "kernels/product_operands.h"
#include "kernels/products.h"
#include "native/binding.h"

namespace twofour {
namespace {

constexpr BlockMatmulKernel kBlockMatmulKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{{#symbol, "block_matmul", __VA_ARGS__}, symbol##__workspace, symbol}},
#include "block_matmul.inc"
#undef TWOFOUR_ROW
};

int64_t width_of(const char* dtype) {
  return std::strcmp(dtype, "float32") == 0 ? 4 : std::strcmp(dtype, "bfloat16") == 0 ? 2 : 1;
}

bool are_blocks(int64_t rows, int64_t columns, int64_t r, int64_t c, int64_t parts) {
  const auto side = [](int64_t n) { return 1 <= n && n <= kLargestSide; };
  return 0 < rows && 0 < columns && rows <= kLargestLength && columns <= kLargestLength && side(r) && side(c) &&
         1 <= parts && parts <= kMostParts && rows % parts == 0;
}

BlockShape shape_of(int64_t rows, int64_t columns, int64_t r, int64_t c, int64_t parts, int64_t width) {
  const bool known = width == 1 || width == 2 || width == 4;
  if (!known || !are_blocks(rows, columns, r, c, parts)) throw std::invalid_argument("no such blocks");
  return {rows, columns, r, c, parts, width};
}

// What holds of every head that packing writes, and that the bytes behind the header are as many as it says.
void require_blocks(const PackedWeight& packed, const char* dtype) {
  const int64_t rows = packed.head().rows, columns = packed.head().columns;
  packed.require_sound(packed.head().group == 0 && columns <= kLastIndex * 4 && rows / 4 <= packed.behind() &&
                       packed.behind() >= static_cast<int64_t>(sizeof(BlockHead)));
  const BlockHead& head = *reinterpret_cast<const BlockHead*>(packed.bytes());
  packed.require_sound(are_blocks(rows, columns, head.r, head.c, head.parts) && 0 <= head.indices &&
                       head.indices <= packed.behind());
  const BlockShape shape(rows, columns, head.r, head.c, head.parts, width_of(dtype));
  packed.require_sound(shape.sound() && head.indices % shape.multiple == 0 &&
                       BlockPlaces(shape, head.indices).end == packed.behind());
}

}  // namespace

void bind_block_matmul(nb::module_& m) {
  bind_table(m, kBlockMatmulKernels);
  add_products(m, kBlockMatmulKernels, std::size(kBlockMatmulKernels), [](const RowBase& row, const PackedWeight& packed) {
    require_blocks(packed, row.dtype);
  });
  m.attr("block_window") = kWindow;
  m.attr("block_largest_side") = kLargestSide;
  m.attr("block_last_index") = kLastIndex;
  // Of a weight (rows, columns) in blocks of r x c, its rows in `parts`, a value of `width` bytes: rows of a strip, dwords
  // of a run, rows of a part with padding, the index of the zeros, what the indices of a strip are a multiple of.
  m.def("block_shape", [](int64_t rows, int64_t columns, int64_t r, int64_t c, int64_t parts, int64_t width) {
    const BlockShape shape = shape_of(rows, columns, r, c, parts, width);
    return nb::make_tuple(shape.strip, shape.run, shape.part_units * kBlockUnit, shape.zero, shape.multiple, shape.sound());
  });
  // Of the same with so many indices: where starts, counts, indices, scales, sums and weights begin, and the layout ends, in
  // bytes, and how many windows are counted: none where indices are not places in them.
  m.def("block_places",
        [](int64_t rows, int64_t columns, int64_t r, int64_t c, int64_t parts, int64_t width, int64_t indices) {
    if (indices < 0 || indices > kMostIndices) throw std::invalid_argument("no such blocks");
    const BlockShape shape = shape_of(rows, columns, r, c, parts, width);
    const BlockPlaces places(shape, indices);
    const int64_t windows = shape.windowed() ? shape.counted : 0;
    return nb::make_tuple(windows, places.starts, places.counts, places.indices, places.scales, places.sums, places.weights, places.end);
  });
  // Returns false, without touching y, when `weight` was made for another layout or shape. y is contiguous.
  bind_call(m, "block_matmul", +[](RowOf<BlockMatmulKernel> index, const Operand& x, const Operand& weight, const Operand& bias,
                                   const Answer& y, int activation, int combine, const Operand& other, bool dynamic,
                                   float x_scale, int x_zero, float y_scale, int y_zero, Threads threads) {
    const BlockMatmulKernel& kernel = row(kBlockMatmulKernels, index);
    const Border border(kernel.name);
    const WholeRange range(kernel.dtype, {dynamic, x_scale, x_zero, y_scale, y_zero});
    const ProductOperands seen(border, x, bias, y, range.reads(kernel.dtype), range.writes(), {activation, combine}, other);
    const PackedWeight packed(border, weight);
    if (!packed.made_for(kernel.dtype, kernel.layout, seen.to.width, seen.from.width)) return false;
    require_blocks(packed, kernel.dtype);
    range.require(border, seen.from.type, x, weight);
    run_product(border, kernel, seen.call(packed, range.quantization, threads));
    return true;
  });
}

}  // namespace twofour
