// Pruned gradients for Python.
#include "native/binding.h"
#include "native/parallel.h"
#include "nm_gradient.h"
#include "tasks.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr NmGradientKernel kNmGradientKernels[] = {
#define TWOFOUR_NM_GRADIENT(symbol, isa) {#symbol, isa, symbol},
#include "nm_gradient.inc"
#undef TWOFOUR_NM_GRADIENT
};

}  // namespace

void bind_nm_gradient(nb::module_& m) {
  m.def("nm_gradient_rows", [] {
    nb::list rows;
    for (const auto& k : kNmGradientKernels) rows.append(nb::make_tuple(k.name, k.isa));
    return rows;
  });
  m.def("nm_gradient", [](int index, uintptr_t gradient, bool bf16, int64_t stride, int64_t samples, int64_t tokens,
                          int64_t columns, int mode, float eps, uint32_t seed, uintptr_t out, bool packed,
                          int threads) {
    const NmGradientKernel& kernel = row(kNmGradientKernels, index);
    if (columns % 4 != 0) throw nb::value_error("columns are no multiple of 4");
    if (mode < 0 || mode > static_cast<int>(GradientMode::unbiased)) throw nb::value_error("no such mode");
    NmGradient args{pointer<const void>(gradient), bf16, stride, samples, tokens, columns,
                    static_cast<GradientMode>(mode), eps, seed, pointer<void>(out), packed, threads, 0, 0};
    if (samples <= 0 || tokens <= 0 || columns <= 0) return;
    nb::gil_scoped_release release;
    parallel_for(GradientTasks(args).count(), 1, threads, [&](int64_t begin, int64_t end) {
      NmGradient mine = args;
      mine.begin = begin;
      mine.end = end;
      kernel.run(mine);
    });
  });
}

}  // namespace twofour
