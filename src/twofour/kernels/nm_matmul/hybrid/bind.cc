// Products by packed weights of two regions for Python: the table of kernels, the call.
#include <cstring>

#include "hybrid.h"
#include "kernels/layouts/packed_regions.h"
#include "kernels/product_operands.h"
#include "kernels/products.h"
#include "native/binding.h"

namespace twofour {
namespace {

constexpr HybridMatmulKernel kHybridMatmulKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{{#symbol, "hybrid_matmul", __VA_ARGS__}, symbol##__workspace, symbol}},
#include "hybrid.inc"
#undef TWOFOUR_ROW
};

// What holds of all bytes that packing writes: sizes alone; which groups are dense each call looks at.
void require_regions(const RowBase& row, const PackedWeight& packed) { packed.require_sound(regions_fit(packed, row.layout)); }

}  // namespace

void bind_hybrid_matmul(nb::module_& m) {
  bind_table(m, kHybridMatmulKernels);
  add_products(m, kHybridMatmulKernels, std::size(kHybridMatmulKernels), require_regions);
  // Returns false, without touching y, when `weight` was made for another layout or shape. y is contiguous.
  bind_call(m, "hybrid_matmul", +[](RowOf<HybridMatmulKernel> index, const Operand& x, const Operand& weight, const Operand& bias,
                                    const Answer& y, int activation, int combine, const Operand& other, bool dynamic,
                                    float x_scale, int x_zero, float y_scale, int y_zero, Threads threads) {
    const HybridMatmulKernel& kernel = row(kHybridMatmulKernels, index);
    const Border border(kernel.name);
    const WholeRange range(kernel.dtype, {dynamic, x_scale, x_zero, y_scale, y_zero});
    const ProductOperands seen(border, x, bias, y, range.reads(kernel.dtype), range.writes(), {activation, combine}, other);
    const PackedWeight packed(border, weight);
    if (!packed.made_for(kernel.dtype, kernel.layout, seen.to.width, seen.from.width)) return false;
    require_regions(kernel, packed);
    range.require(border, seen.from.type, x, weight);
    run_product(border, kernel, seen.call(packed, range.quantization, threads));
    return true;
  });
}

}  // namespace twofour
