// Sums over rows, and means over pixels, for Python.
#include "column_sums.h"
#include "kernels/conv_images.h"
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

// Sums of `count` matrices, one behind the other, and so their sums. Members share columns, then matrices.
void run(const ColumnSumsKernel& kernel, const ColumnSums& args, int64_t count, int64_t columns, int threads) {
  const int64_t share = threads > 1 ? kShare : columns;  // one thread reads whole rows
  if (columns == 0) return;
  const Unlocked unlocked;
  const int64_t each = ceil_div(columns, share), bytes = args.rows * args.stride * (args.bf16 ? 2 : 4);
  parallel_for(count * each, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end;) {
      const int64_t matrix = at / each, first = at % each, stop = least(each, first + end - at);
      ColumnSums mine = args;
      mine.from = static_cast<const char*>(args.from) + matrix * bytes, mine.sums = args.sums + matrix * columns;
      mine.begin = first * share, mine.end = least(stop * share, columns);
      kernel.run(mine);
      at += stop - first;
    }
  });
}

}  // namespace

void bind_column_sums(nb::module_& m) {
  bind_table(m, kColumnSumsKernels);
  bind_call(m, "column_sums", +[](RowOf<ColumnSumsKernel> index, const Operand& from, const Answer& sums, Threads threads) {
    const ColumnSumsKernel& kernel = row(kColumnSumsKernels, index);
    const Border border(kernel.name);
    const Rows rows = border.rows(from, "input", kReal);
    const View to = border.exactly(sums, "answer", {Type::f32}, rows.width);
    run(kernel, {rows.data, rows.type == Type::bf16, rows.rows, rows.stride, 1.0f, floats(to), 0, 0}, 1, rows.width, threads);
  });
  // x: float32 (images, channels, height, width) with channels densest; means: float32 (images, channels).
  bind_call(m, "pixel_means", +[](RowOf<ColumnSumsKernel> index, const Operand& x, const Answer& means, Threads threads) {
    const ColumnSumsKernel& kernel = row(kColumnSumsKernels, index);
    const Border border(kernel.name);
    const View from = pixels(border, x, "input");
    const int64_t images = from.shape[0], channels = from.shape[1], count = from.shape[2] * from.shape[3];
    const View to = border.exactly(means, "answer", {Type::f32}, images * channels);
    run(kernel, {from.data, false, count, channels, static_cast<float>(count), floats(to), 0, 0}, images, channels, threads);
  });
}

}  // namespace twofour
