// Rotary positions for Python: the rows and the call.
#include "native/binding.h"
#include "native/integers.h"
#include "native/parallel.h"
#include "native/unlocked.h"
#include "rotation.h"

namespace twofour {
namespace {

constexpr RotationKernel kRotationKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "rotation", __VA_ARGS__}, symbol},
#include "rotation.inc"
#undef TWOFOUR_ROW
};

constexpr int64_t kShare = 16384;  // numbers of a member's share at least, as in norm/bind.cc

// (batch, length, columns), columns contiguous.
View rows_of(const Border& border, const Operand& operand, const char* role, Types types) {
  const View v = border.strided(operand, role, types);
  border.require(v.ndim == 3 && (v.shape[2] <= 1 || v.strides[2] == 1 || v.count() == 0), operand, role,
                 types.text() + " (batch, length, columns) on cpu, columns contiguous");
  return v;
}

}  // namespace

void bind_rotation(nb::module_& m) {
  bind_table(m, kRotationKernels);
  // x: float32 or bfloat16 (batch, length, heads * width), its columns contiguous; cosines and sines (batch, length, width), of
  // one of these types alike, any strides but the last; y: as x, without gaps.
  bind_call(m, "rotation", +[](RowOf<RotationKernel> index, const Operand& x, const Operand& cos, const Operand& sin, const Answer& y,
                       int64_t width, Threads threads) {
    const RotationKernel& kernel = row(kRotationKernels, index);
    const Border border(kernel.name);
    const View from = rows_of(border, x, "input", kReal), first = rows_of(border, cos, "cosines", kReal);
    const View second = rows_of(border, sin, "sines", {first.type});
    border.require(width > 0 && width % 2 == 0 && from.shape[2] % width == 0, x, "input", "heads of an even number of columns");
    const auto fits = [&](const View& v) {
      return v.shape[0] == from.shape[0] && v.shape[1] == from.shape[1] && v.shape[2] == width;
    };
    border.require(fits(first), cos, "cosines", "(batch, length, width) of the input's heads");
    border.require(fits(second), sin, "sines", "(batch, length, width) of the input's heads");
    const View to = border.exactly(y, "answer", {from.type}, from.count());
    if (from.count() == 0) return;
    const Rotation args{from.data, to.data, from.type == Type::bf16, first.type == Type::bf16,
                        from.strides[0], from.strides[1], {first.data, first.strides[0], first.strides[1]},
                        {second.data, second.strides[0], second.strides[1]}, from.shape[1], from.shape[2] / width, width};
    const Unlocked unlocked;
    parallel_for(from.shape[0] * from.shape[1], ceil_div(kShare, from.shape[2]), threads,
                 [&](int64_t begin, int64_t end) { kernel.run(args, begin, end); });
  });
}

}  // namespace twofour
