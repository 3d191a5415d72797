// The search for a permutation, for Python.
#include "native/binding.h"
#include "native/parallel.h"
#include "stripes.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr struct {
  const char *name, *isa;
  StripeKernel (*kernel)();
} kRows[] = {
#define TWOFOUR_NM_STRIPES(symbol, isa) {#symbol, isa, symbol},
#include "stripes.inc"
#undef TWOFOUR_NM_STRIPES
};

// Calls a Python function; an interruption comes out as an exception.
void tell_python(void* told, int64_t done, int64_t of) {
  nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals()) throw nb::python_error();
  (*static_cast<nb::object*>(told))(done, of);
}

}  // namespace

void bind_nm_stripes(nb::module_& m) {
  m.def("nm_stripes_rows", [] {
    nb::list rows;
    for (const auto& k : kRows) rows.append(nb::make_tuple(k.name, k.isa));
    return rows;
  });
  m.def("nm_stripes_refine", [](int index, uintptr_t columns, int64_t rows, int64_t count, int n, int m, uint64_t seed,
                                int threads, uintptr_t order, int window, int64_t escapes, nb::object tell) {
    const StripeKernel kernel = row(kRows, index).kernel();
    if (rows % kStripeLanes || window % m || window > kStripeMaxWindow || window < 2 * m || n < 1 || n >= m)
      throw nb::value_error("no such search");
    nb::gil_scoped_release release;
    return refine_stripes({&kernel, pointer<const float>(columns), rows, count, n, m, seed, threads,
                           pointer<int64_t>(order), tell_python, &tell},
                          window, escapes);
  });
  m.def("nm_stripes_assign", [](int index, uintptr_t columns, int64_t rows, int64_t count, int n, int m, uint64_t seed,
                                int threads, uintptr_t order, int64_t block, int64_t rounds,
                                int64_t patience) {
    const StripeKernel kernel = row(kRows, index).kernel();
    if (rows % kStripeLanes || n < 1 || n >= m || m > 64 || block < 1) throw nb::value_error("no such search");
    nb::gil_scoped_release release;
    return assign_stripes({&kernel, pointer<const float>(columns), rows, count, n, m, seed, threads,
                           pointer<int64_t>(order), nullptr, nullptr},
                          block, rounds, patience);
  });
}

}  // namespace twofour
