// Dense products for Python: the table of kernels, the packing, the call.
#include "dense_matmul.h"
#include "kernels/nm_matmul/layout_header.h"
#include "native/binding.h"
#include "native/scratch.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr DenseMatmulKernel kDenseMatmulKernels[] = {
#define TWOFOUR_DENSE_MATMUL_ROW(symbol, isa, dtype, layout) \
  {#symbol, isa, dtype, layout, symbol##__workspace, symbol},
#include "dense_matmul.inc"
#undef TWOFOUR_DENSE_MATMUL_ROW
};

}  // namespace

void bind_dense_matmul(nb::module_& m) {
  m.def("dense_matmul_rows", [] {
    nb::list rows;
    for (const auto& k : kDenseMatmulKernels) rows.append(nb::make_tuple(k.name, k.isa, k.dtype, k.layout));
    return rows;
  });
  m.def("dense_int4_bytes", int4_dense_layout__bytes);
  m.def("dense_int4_pack", [](uintptr_t values, uintptr_t scales, uintptr_t zeros, int64_t out, int64_t in,
                              int64_t group, uintptr_t packed) {
    nb::gil_scoped_release release;
    int4_dense_layout__pack(pointer<const uint8_t>(values), pointer<const float>(scales), pointer<const float>(zeros),
                            out, in, group, pointer<void>(packed));
  });
  // Returns false, without touching y, when `weight` was made for another layout or shape. y is contiguous.
  m.def("dense_matmul", [](int index, uintptr_t x, int type, int64_t x_stride, uintptr_t weight, uintptr_t bias,
                           uintptr_t y, int64_t tokens, int64_t out_features, int64_t in_features, int activation,
                           int combine, uintptr_t other, int64_t other_stride, int threads) {
    static Scratch scratch;
    const DenseMatmulKernel& kernel = row(kDenseMatmulKernels, index);
    const auto* head = pointer<const LayoutHeader>(weight);
    if (!head->made_for(kernel.dtype, kernel.layout, out_features, in_features)) return false;
    nb::gil_scoped_release release;
    DenseMatmul args{pointer<const void>(x), static_cast<Type>(type), x_stride, head + 1, pointer<const float>(bias),
                     pointer<void>(y), static_cast<Type>(type), out_features, tokens, out_features, in_features,
                     head->group & ~kZerosBit, (head->group & kZerosBit) != 0,
                     {static_cast<Activation>(activation), static_cast<Combine>(combine), pointer<const void>(other),
                      other_stride},
                     {}, threads, nullptr};
    const Scratch::Lease lease(scratch, static_cast<size_t>(kernel.workspace_bytes(args)));
    args.workspace = lease.data();
    kernel.run(args);
    return true;
  });
}

}  // namespace twofour
