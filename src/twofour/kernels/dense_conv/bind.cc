// Convolutions with dense weights for Python: the table of kernels and the call.
#include <algorithm>

#include "dense_conv.h"
#include "kernels/conv_images.h"
#include "native/binding.h"
#include "native/integers.h"
#include "native/scratch.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr DenseConvKernel kDenseConvKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "dense_conv", __VA_ARGS__}, symbol##__workspace, symbol},
#include "dense_conv.inc"
#undef TWOFOUR_ROW
};

// A transformed weight, and behind it the (out, in, 3, 3) that it was made of.
const float* transformed(const Border& border, const Operand& weight, const RowBase& row, int64_t out, int64_t in) {
  const int64_t inputs = std::string_view(row.layout) == "winograd4" ? 6 : 4;
  const int64_t count = (round_up(out, kConvPanel) * inputs * inputs + out * 9) * in;
  const View view = border.exactly(weight, "weight", {Type::f32}, count);
  if (reinterpret_cast<uintptr_t>(view.data) % 64 != 0)
    border.refuse(weight, "weight", "numbers that start at a multiple of 64 bytes", "copy them: weight.clone()");
  return floats(view);
}

}  // namespace

void bind_dense_conv(nb::module_& m) {
  m.attr("conv_panel") = kConvPanel;
  bind_table(m, kDenseConvKernels);
  // x and y: (images, channels, height, width) with channels densest. `weight`: as the row's layout has it (README.md).
  // `top` and `left`: rows and columns of zeros there; below and right as many as y asks for.
  bind_call(m, "dense_conv", +[](int index, const Operand& x, const Operand& weight, const Operand& bias, const Operand& other,
                         const Answer& y, int64_t top, int64_t left, bool relu, int threads) {
    static Scratch scratch;
    const DenseConvKernel& kernel = row(kDenseConvKernels, index);
    const Border border(kernel.name);
    const View from = pixels(border, x, "input"), to = pixels(border, y, "answer");
    border.require(from.shape[0] == to.shape[0], y, "answer", "as many images as the input");
    const int64_t in = from.shape[1], out = to.shape[1];
    constexpr int64_t most = 1 << 30;
    if (in < 1 || out < 1 || top < 0 || top > most || left < 0 || left > most)
      throw nb::value_error("no such convolution");
    const Numbers shift = border.numbers(bias, "bias", out);
    const View added = other.given() ? pixels(border, other, "second operand") : View{};
    border.require(!other.given() || std::equal(added.shape, added.shape + 4, to.shape), other, "second operand",
                   "the answer's shape");
    DenseConv args{floats(from), transformed(border, weight, kernel, out, in), shift.data(), floats(added), floats(to),
                   from.shape[0], in, out, from.shape[2], from.shape[3], to.shape[2], to.shape[3], top, left,
                   relu, threads, nullptr};
    if (to.count() == 0) return;
    nb::gil_scoped_release release;
    const Scratch::Lease lease(scratch, static_cast<size_t>(kernel.workspace_bytes(args)));
    args.workspace = lease.data();
    kernel.run(args);
  });
}

}  // namespace twofour
