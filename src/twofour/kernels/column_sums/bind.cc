// Sums over rows for Python.
#include "column_sums.h"
#include "native/binding.h"
#include "native/integers.h"
#include "native/parallel.h"
#include "native/unlocked.h"

namespace twofour {
namespace {

constexpr ColumnSumsKernel kColumnSumsKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "column_sums", __VA_ARGS__}, symbol},
#include "column_sums.inc"
#undef TWOFOUR_ROW
};

constexpr int64_t kShare = 256;  // columns of a task: 1 KB of each row, several lines in a row

}  // namespace

void bind_column_sums(nb::module_& m) {
  bind_table(m, kColumnSumsKernels);
  m.def("column_sums", [](int index, const Operand& from, const Operand& sums, int threads) {
    const ColumnSumsKernel& kernel = row(kColumnSumsKernels, index);
    const Border border(kernel.name);
    const Rows rows = border.rows(from, "input", kReal);
    const View to = border.exactly(sums, "answer", {Type::f32}, rows.width);
    const ColumnSums args{rows.data, rows.type == Type::bf16, rows.rows, rows.stride, reinterpret_cast<float*>(to.data), 0, 0};
    const Unlocked unlocked;
    const int64_t share = threads > 1 ? kShare : rows.width;  // one thread reads whole rows
    if (rows.width == 0) return;
    parallel_for(ceil_div(rows.width, share), 1, threads, [&](int64_t begin, int64_t end) {
      ColumnSums mine = args;
      mine.begin = begin * share, mine.end = least(end * share, rows.width);
      kernel.run(mine);
    });
  });
}

}  // namespace twofour
