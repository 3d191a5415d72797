// Masks for Python.
#include "native/binding.h"
#include "native/parallel.h"
#include "nm_groups.h"
#include "nm_mask.h"
#include "nm_nonzero.h"
#include "nm_ties.h"
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

constexpr NmNonzeroKernel kNmNonzeroKernels[] = {
#define TWOFOUR_NM_NONZERO(symbol, isa, width) {#symbol, isa, width, symbol},
#include "nm_nonzero.inc"
#undef TWOFOUR_NM_NONZERO
};

constexpr NmTiesKernel kNmTiesKernels[] = {
#define TWOFOUR_NM_TIES(symbol, isa, width, n, m) {#symbol, isa, width, n, m, symbol},
#include "nm_ties.inc"
#undef TWOFOUR_NM_TIES
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

NmNonzeroCounts nonzero(const NmNonzeroKernel& kernel, uintptr_t values, uintptr_t bits, int64_t count,
                        int64_t magnitude, int64_t finite, int threads) {
  NmNonzeroCounts found = {};
  // 65536 values a share, a multiple of 8: shares write bytes of their own.
  parallel_for(count, 65536, threads, [&](int64_t begin, int64_t end) {
    const NmNonzeroCounts part = kernel.run({pointer<const uint8_t>(values) + begin * kernel.width,
                                             pointer<uint8_t>(bits) + begin / 8, end - begin, magnitude, finite});
    __atomic_fetch_add(&found.nonzero, part.nonzero, __ATOMIC_RELAXED);
    __atomic_fetch_add(&found.negative, part.negative, __ATOMIC_RELAXED);
    __atomic_fetch_add(&found.broken, part.broken, __ATOMIC_RELAXED);
  });
  return found;
}

void require_groups(int64_t length, int n, int group) {
  if (group < 2 || group > kNmGroupsLargest || n < 1 || n >= group) throw nb::value_error("no such N:M");
  if (length % group != 0) throw nb::value_error("the length is no multiple of the group");
}

void bind_nm_nonzero(nb::module_& m) {
  m.def("nm_nonzero_rows", [] {
    nb::list rows;
    for (const auto& k : kNmNonzeroKernels) rows.append(nb::make_tuple(k.name, k.isa, k.width));
    return rows;
  });
  m.def("nm_nonzero", [](int index, uintptr_t values, uintptr_t bits, int64_t count, int64_t magnitude, int64_t finite,
                         int threads) {
    const NmNonzeroKernel& kernel = row(kNmNonzeroKernels, index);
    NmNonzeroCounts found;
    {
      nb::gil_scoped_release release;
      found = nonzero(kernel, values, bits, count, magnitude, finite, threads);
    }
    return nb::make_tuple(found.nonzero, found.negative, found.broken);
  });
  m.def("nm_groups", [](uintptr_t bits, int64_t outer, int64_t length, int64_t inner, int n, int group, bool pairs,
                        bool stop) {
    require_groups(length, n, group);
    if (pairs && (n % 2 != 0 || group % 2 != 0)) throw nb::value_error("pairs take an even N:M");
    NmGroupsFound found;
    {
      nb::gil_scoped_release release;
      found = nm_groups({pointer<const uint8_t>(bits), outer, length, inner, n, group, pairs, stop});
    }
    return nb::make_tuple(found.offending, found.spare, found.first);
  });
  m.def("nm_ties_rows", [] {
    nb::list rows;
    for (const auto& k : kNmTiesKernels) rows.append(nb::make_tuple(k.name, k.isa, k.width, k.n, k.m));
    return rows;
  });
  m.def("nm_ties", [](int index, uintptr_t values, int sign, int64_t outer, int64_t length, int64_t inner, int n,
                      int group) {
    const NmTiesKernel& kernel = row(kNmTiesKernels, index);
    require_groups(length, n, group);
    if (kernel.m != 0 && (kernel.n != n || kernel.m != group)) throw nb::value_error("the row is of another N:M");
    if (sign < 0 || sign > 2) throw nb::value_error("no such sign");
    nb::gil_scoped_release release;
    return kernel.run({pointer<const void>(values), static_cast<Sign>(sign), outer, length, inner, n, group});
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
  bind_nm_nonzero(m);
}

}  // namespace twofour
