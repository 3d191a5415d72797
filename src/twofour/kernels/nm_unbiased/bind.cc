// Unbiased estimates for Python.
#include "native/binding.h"
#include "native/parallel.h"
#include "native/whole.h"
#include "nm_unbiased.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr NmUnbiasedKernel kNmUnbiasedKernels[] = {
#define TWOFOUR_NM_UNBIASED(symbol, isa) {#symbol, isa, symbol},
#include "nm_unbiased.inc"
#undef TWOFOUR_NM_UNBIASED
};
constexpr int64_t kBlock = 384;  // rows of a block of the panel layouts

}  // namespace

void bind_nm_unbiased(nb::module_& m) {
  m.def("nm_unbiased_rows", [] {
    nb::list rows;
    for (const auto& k : kNmUnbiasedKernels) rows.append(nb::make_tuple(k.name, k.isa));
    return rows;
  });
  m.def("nm_unbiased", [](int index, uintptr_t gradient, bool bf16, int64_t stride, int64_t tokens, int64_t rows,
                          uint32_t seed, bool to_bf16, uintptr_t packed, int threads) {
    const NmUnbiasedKernel& kernel = row(kNmUnbiasedKernels, index);
    if (tokens % 4 != 0) throw nb::value_error("tokens are no multiple of 4");
    nb::gil_scoped_release release;
    parallel_for(ceil_div(rows, kBlock), 1, threads, [&](int64_t begin, int64_t end) {
      kernel.run({pointer<const void>(gradient), bf16, stride, tokens, rows, seed, to_bf16, pointer<void>(packed),
                  begin * kBlock, least(end * kBlock, rows)});
    });
  });
}

}  // namespace twofour
