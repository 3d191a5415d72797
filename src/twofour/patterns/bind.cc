// Masks for Python.
#include "native/binding.h"
#include "native/parallel.h"
#include "nm_mask.h"
#include "nm_tiles.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr NmMaskKernel kNmMaskKernels[] = {
#define TWOFOUR_NM_MASK(symbol, isa, n, m) {#symbol, isa, n, m, symbol},
#include "nm_mask.inc"
#undef TWOFOUR_NM_MASK
};

constexpr NmTilesKernel kNmTilesKernels[] = {
#define TWOFOUR_NM_TILES(symbol, isa) {#symbol, isa, symbol},
#include "nm_tiles.inc"
#undef TWOFOUR_NM_TILES
};

void bind_nm_tiles(nb::module_& m) {
  m.def("nm_tiles_rows", [] {
    nb::list rows;
    for (const auto& k : kNmTilesKernels) rows.append(nb::make_tuple(k.name, k.isa));
    return rows;
  });
  m.def("nm_tiles", [](int index, uintptr_t scores, uintptr_t keep, int64_t bands, int64_t columns, bool absolute,
                       int threads) {
    const NmTilesKernel& kernel = row(kNmTilesKernels, index);
    if (columns % 4 != 0) throw nb::value_error("columns are no multiple of 4");
    bool finite = true;
    nb::gil_scoped_release release;
    const int64_t grain = 1 + 4096 / (columns + 1);  // below 16384 values, starting a thread costs more than the search
    parallel_for(bands, grain, threads, [&](int64_t begin, int64_t end) {
      const NmTiles part{pointer<const float>(scores) + 4 * begin * columns, pointer<uint8_t>(keep) + 4 * begin * columns,
                         end - begin, columns, absolute};
      if (!kernel.run(part)) __atomic_store_n(&finite, false, __ATOMIC_RELAXED);
    });
    return finite;
  });
}

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
  bind_nm_tiles(m);
}

}  // namespace twofour
