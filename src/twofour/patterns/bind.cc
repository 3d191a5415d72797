// Masks for Python.
#include "native/binding.h"
#include "native/parallel.h"
#include "nm_mask.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr NmMaskKernel kNmMaskKernels[] = {
#define TWOFOUR_NM_MASK(symbol, isa, n, m) {#symbol, isa, n, m, symbol},
#include "nm_mask.inc"
#undef TWOFOUR_NM_MASK
};

}  // namespace

void bind_nm_mask(nb::module_& m) {
  m.def("nm_mask_rows", [] {
    nb::list rows;
    for (const auto& k : kNmMaskKernels) rows.append(nb::make_tuple(k.name, k.isa, k.n, k.m));
    return rows;
  });
  m.def("nm_mask", [](int index, uintptr_t scores, uintptr_t keep, int64_t groups, int n, int group, bool absolute,
                      int threads) {
    const NmMaskKernel& kernel = row(kNmMaskKernels, index);
    if (group < 1 || group > kNmMaskMaxGroup || n < 1 || n > group) throw nb::value_error("no such N:M");
    if (kernel.m != 0 && (kernel.n != n || kernel.m != group)) throw nb::value_error("the row is of another N:M");
    bool finite = true;
    nb::gil_scoped_release release;
    // 1024 groups a share: below that, starting a thread costs more than the mask.
    parallel_for(groups, 1024, threads, [&](int64_t begin, int64_t end) {
      const NmMask part{pointer<const float>(scores) + begin * group, pointer<uint8_t>(keep) + begin * group,
                        end - begin, n, group, absolute};
      if (!kernel.run(part)) __atomic_store_n(&finite, false, __ATOMIC_RELAXED);
    });
    return finite;
  });
}

}  // namespace twofour
