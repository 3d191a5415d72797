// The compiled extension: kernel tables and raw-pointer calls. No torch in here; Python owns tensors and checks them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "isa.h"
#include "kernels/nm_compress/nm_compress.h"
#include "parallel.h"
#include "patterns/nm_mask.h"

namespace nb = nanobind;
using namespace twofour;

namespace {

constexpr NmMaskKernel kNmMaskKernels[] = {
#define TWOFOUR_NM_MASK(symbol, isa, n, m) {#symbol, isa, n, m, symbol},
#include "patterns/nm_mask.inc"
#undef TWOFOUR_NM_MASK
};

constexpr NmCompressKernel kNmCompressKernels[] = {
#define TWOFOUR_NM_COMPRESS(symbol, isa) {#symbol, isa, symbol},
#include "kernels/nm_compress/nm_compress.inc"
#undef TWOFOUR_NM_COMPRESS
};

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <class Row, size_t kCount>
const Row& row(const Row (&rows)[kCount], int index) {
  if (index < 0 || index >= static_cast<int>(kCount)) throw nb::index_error("no such kernel row");
  return rows[index];
}

void bind_masks(nb::module_& m) {
  m.def("nm_mask_rows", [] {
    nb::list rows;
    for (const auto& k : kNmMaskKernels) rows.append(nb::make_tuple(k.name, k.isa, k.n, k.m));
    return rows;
  });
  m.def("nm_mask", [](int index, uintptr_t scores, uintptr_t keep, int64_t groups, int n, int group, bool absolute,
                      int threads) {
    const NmMaskKernel& kernel = row(kNmMaskKernels, index);
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

void bind_compress(nb::module_& m) {
  m.def("nm_compress_rows", [] {
    nb::list rows;
    for (const auto& k : kNmCompressKernels) rows.append(nb::make_tuple(k.name, k.isa));
    return rows;
  });
  m.def("nm_compress", [](int index, uintptr_t weight, int64_t stride, int64_t rows, int64_t columns, uintptr_t values,
                          uintptr_t indices, int threads) {
    const NmCompressKernel& kernel = row(kNmCompressKernels, index);
    nb::gil_scoped_release release;
    return kernel.run({pointer<const float>(weight), stride, rows, columns, pointer<float>(values),
                       pointer<uint8_t>(indices), threads});
  });
}

}  // namespace

NB_MODULE(_ext, m) {
  m.def("detect_isa", [] { return std::string(detect_isa()); });
  m.def("threads_backend", [] { return std::string(threads_backend()); });
  bind_masks(m);
  bind_compress(m);
}
