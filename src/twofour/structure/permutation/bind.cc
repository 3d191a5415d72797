// The search for a permutation, for Python.
#include <algorithm>
#include <cmath>

#include "assignment.h"
#include "native/binding.h"
#include "native/parallel.h"
#include "stripes.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr KernelRow<StripeKernel()> kRows[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "nm_stripes", __VA_ARGS__}, symbol},
#include "stripes.inc"
#undef TWOFOUR_ROW
};

// Calls a Python function; an interruption comes out as an exception.
void tell_python(void* told, int64_t done, int64_t of) {
  nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals()) throw nb::python_error();
  (*static_cast<nb::object*>(told))(done, of);
}

// Scores whose sums are finite: of 64 vectors of a stripe in float32, of a block of stripes in float64.
bool are_scores(const View& columns) {
  constexpr float kMost = 0x1p100f;
  const auto* score = reinterpret_cast<const float*>(columns.data);
  return std::all_of(score, score + columns.count(), [](float value) { return value >= 0.0f && value <= kMost; });
}

// What both searches look at: every position of `order` names a column that is there. Of sums that are not finite no deal is
// the best one, and the searches would look for it beyond their tables.
StripeSearch search_of(const Border& border, const Operand& columns, const Operand& order, int n, int m) {
  if (n < 1 || n >= m || m > 64) throw std::invalid_argument("no such search");
  const View held = border.dense(columns, "columns", {Type::f32}), places = border.dense(order, "order", {Type::s64});
  border.require(held.ndim == 2 && held.shape[1] % kStripeLanes == 0 && reinterpret_cast<uintptr_t>(held.data) % 64 == 0,
                 columns, "columns", "(columns, rows) at a multiple of 64, rows padded to vectors");
  border.require(are_scores(held), columns, "columns", "scores from 0 to 2^100");
  auto* positions = reinterpret_cast<int64_t*>(places.data);
  const int64_t count = places.count();
  bool inside = count > 0 && count % m == 0;
  for (int64_t i = 0; i < count; i++) inside = inside && positions[i] >= 0 && positions[i] < held.shape[0];
  border.require(inside, order, "order", "whole stripes of columns that are there");
  return {nullptr, reinterpret_cast<const float*>(held.data), held.shape[1], count, n, m, 0, 1, positions, nullptr, nullptr};
}

}  // namespace

void bind_nm_stripes(nb::module_& m) {
  bind_table(m, kRows);
  // `columns`: (columns, rows), padded; `order`: some of its columns, rearranged in place.
  m.def("nm_stripes_refine", [](int index, const Operand& columns, const Operand& order, int n, int m, uint64_t seed,
                                int threads, int window, int64_t escapes, nb::object tell) {
    const auto& found = row(kRows, index);
    const StripeKernel kernel = found.run();
    const Border border(found.name);
    StripeSearch search = search_of(border, columns, order, n, m);
    if (window % m || window > kStripeMaxWindow || window < 2 * m || window > search.count)
      throw std::invalid_argument("no such search");
    search.kernel = &kernel, search.seed = seed, search.threads = threads;
    search.tell = tell_python, search.told = &tell;
    const Unlocked unlocked;
    return refine_stripes(search, window, escapes);
  });
  m.def("nm_stripes_assign", [](int index, const Operand& columns, const Operand& order, int n, int m, uint64_t seed,
                                int threads, int64_t block, int64_t rounds, int64_t patience) {
    const auto& found = row(kRows, index);
    const StripeKernel kernel = found.run();
    const Border border(found.name);
    StripeSearch search = search_of(border, columns, order, n, m);
    if (block < 1) throw std::invalid_argument("no such search");
    search.kernel = &kernel, search.seed = seed, search.threads = threads;
    const Unlocked unlocked;
    return assign_stripes(search, block, rounds, patience);
  });
  // `gains`: (count, count), finite; `columns` (count): the column of each row, so that the sum of gains is largest.
  m.def("assign_rows", [](const Operand& gains, const Answer& columns) {
    const Border border("assign_rows");
    const View given = border.dense(gains, "gains", {Type::f32});
    border.require(given.ndim == 2 && given.shape[0] == given.shape[1], gains, "gains", "as many rows as columns");
    const int64_t count = given.shape[0];
    const View written = border.exactly(columns, "columns", {Type::s64}, count);
    const auto* start = reinterpret_cast<const float*>(given.data);
    const std::vector<double> values(start, start + count * count);
    const auto finite = [](double value) { return std::isfinite(value); };
    border.require(std::all_of(values.begin(), values.end(), finite), gains, "gains", "finite values");
    const Unlocked unlocked;
    const std::vector<int32_t> found = assign(values.data(), count);
    std::copy(found.begin(), found.end(), reinterpret_cast<int64_t*>(written.data));
  });
}

}  // namespace twofour
