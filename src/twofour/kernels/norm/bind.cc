// Normalisation for Python: the rows, and the call through raw pointers.
#include "native/binding.h"
#include "native/parallel.h"
#include "norm.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr NormKernel kKernels[] = {
#define TWOFOUR_NORM(symbol, isa, dtype) {#symbol, isa, dtype, symbol},
#include "norm.inc"
#undef TWOFOUR_NORM
};

}  // namespace

void bind_norm(nb::module_& m) {
  m.def("norm_rows", [] {
    nb::list rows;
    for (const auto& k : kKernels) rows.append(nb::make_tuple(k.name, k.isa, k.dtype));
    return rows;
  });
  m.def("norm", [](int index, uintptr_t x, int64_t x_stride, uintptr_t weight, uintptr_t bias, uintptr_t y,
                   bool y_bf16, int64_t rows, int64_t width, float eps, bool centred, int threads) {
    const NormKernel& kernel = row(kKernels, index);
    const Norm args{pointer<const void>(x), x_stride, pointer<const float>(weight), pointer<const float>(bias),
                    pointer<void>(y),       y_bf16,   rows,                         width,
                    eps,                    centred};
    nb::gil_scoped_release release;
    // 16384 elements a share: below that, starting a thread costs more than the rows.
    const int64_t grain = width > 0 && width < 16384 ? 16384 / width : 1;
    parallel_for(rows, grain, threads, [&](int64_t begin, int64_t end) { kernel.run(args, begin, end); });
  });
}

}  // namespace twofour
