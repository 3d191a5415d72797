// Packing for Python.
#include "native/binding.h"
#include "nm_compress.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr NmCompressKernel kNmCompressKernels[] = {
#define TWOFOUR_NM_COMPRESS(symbol, isa) {#symbol, isa, symbol},
#include "nm_compress.inc"
#undef TWOFOUR_NM_COMPRESS
};

}  // namespace

void bind_nm_compress(nb::module_& m) {
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

}  // namespace twofour
