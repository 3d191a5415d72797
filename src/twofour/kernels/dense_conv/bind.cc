// Convolutions with dense weights for Python: the table of kernels and the call.
#include <algorithm>
#include <string_view>

#include "dense_conv.h"
#include "kernels/conv_images.h"
#include "kernels/convolutions.h"
#include "native/binding.h"
#include "native/integers.h"
#include "native/scratch.h"

namespace twofour {
namespace {

constexpr DenseConvKernel kDenseConvKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "dense_conv", __VA_ARGS__}, symbol##__workspace, symbol},
#include "dense_conv.inc"
#undef TWOFOUR_ROW
};

// A weight in panels; a transformed one has the (out, in, 3, 3) that it was made of behind it.
const float* panels(const Border& border, const Operand& weight, const RowBase& row, const DenseConv& a) {
  const int64_t in = a.in_channels / a.groups, out = round_up(a.out_channels / a.groups, kConvPanel) * a.groups;
  const std::string_view layout = row.layout;
  const int64_t inputs = layout == "winograd4" ? 6 : 4;
  const int64_t count = layout == "direct" ? out * a.height.taps * a.width.taps * in
                                           : (out * inputs * inputs + a.out_channels * 9) * in;
  const View view = border.exactly(weight, "weight", {Type::f32}, count);
  if (reinterpret_cast<uintptr_t>(view.data) % 64 != 0)
    border.refuse(weight, "weight", "numbers that start at a multiple of 64 bytes", "copy them: weight.clone()");
  return floats(view);
}

bool is_winograds(const DenseConv& a) {
  for (const ConvAxis& axis : {a.height, a.width})
    if (axis.taps != 3 || axis.stride != 1 || axis.dilation != 1) return false;
  return a.groups == 1 && !a.activation.passes();
}

DenseConv dense(const Convolution& c) {
  return {c.x, reinterpret_cast<const float*>(c.weight), c.bias, c.other, c.y, c.images, c.in_channels, c.out_channels,
          c.groups, c.height, c.width, c.activation, c.threads, c.workspace, c.plane};
}

bool is_direct(const RowBase& row) { return std::string_view(row.layout) == "direct"; }

const DenseConvKernel& kernel_of(const RowBase& row) { return static_cast<const DenseConvKernel&>(row); }

const ConvolutionRow kInChains{
    nullptr,
    [](const RowBase& row, const Convolution& c) { return kernel_of(row).workspace_bytes(dense(c)); },
    [](const RowBase& row, const Convolution& c) { kernel_of(row).run(dense(c)); },
    [](const Border& border, const RowBase& row, const Operand& weight, Convolution* c) {
      const DenseConv a = dense(*c);
      if (!is_direct(row) && !is_winograds(a)) throw std::invalid_argument("no such convolution");
      c->weight = reinterpret_cast<const char*>(panels(border, weight, row, a));
    },
    [](const RowBase& row, const Convolution& c) {
      return is_direct(row) && takes_planes(c.in_channels, c.groups, c.height, c.width);
    }};

}  // namespace

void bind_dense_conv(nb::module_& m) {
  m.attr("conv_panel") = kConvPanel;
  m.attr("conv_few_channels") = kFewChannels;
  bind_table(m, kDenseConvKernels);
  add_convolutions(m, kDenseConvKernels, kInChains);
  // x and y: (images, channels, height, width) with channels densest; x of few channels may be contiguous. `weight`: as the row's layout has it. `height` and
  // `width`: taps, stride, padding, dilation.
  bind_call(m, "dense_conv", +[](RowOf<DenseConvKernel> index, const Operand& x, const Operand& weight, const Operand& bias, const Operand& other,
                         const Answer& y, int64_t groups, Axis height, Axis width, int activation, Threads threads) {
    static Scratch scratch;
    const DenseConvKernel& kernel = row(kDenseConvKernels, index);
    const Border border(kernel.name);
    int64_t plane = 0;
    const View from = pixels(border, x, "input", {Type::f32}, is_direct(kernel) ? &plane : nullptr);
    const View to = pixels(border, y, "answer");
    border.require(from.shape[0] == to.shape[0], y, "answer", "as many images as the input");
    const int64_t in = from.shape[1], out = to.shape[1];
    if (in < 1 || out < 1 || groups < 1 || in % groups != 0 || out % groups != 0)
      throw std::invalid_argument("no such convolution");
    const Numbers shift = border.numbers(bias, "bias", out);
    const View added = other.given() ? pixels(border, other, "second operand") : View{};
    border.require(!other.given() || std::equal(added.shape, added.shape + 4, to.shape), other, "second operand",
                   "the answer's shape");
    DenseConv args{floats(from), nullptr, shift.data(), floats(added), floats(to), from.shape[0], in, out, groups,
                   axis(height, from.shape[2], to.shape[2]), axis(width, from.shape[3], to.shape[3]),
                   conv_activation(activation), threads, nullptr, plane};
    if (!is_direct(kernel) && !is_winograds(args)) throw std::invalid_argument("no such convolution");
    border.require(plane == 0 || takes_planes(in, groups, args.height, args.width), x, "input", "a tensor in torch.channels_last");
    require_halo(args.height, args.width, in);
    args.weight = panels(border, weight, kernel, args);
    if (to.count() == 0) return;
    const Unlocked unlocked;
    const Scratch::Lease lease(scratch, static_cast<size_t>(kernel.workspace_bytes(args)));
    args.workspace = lease.data();
    kernel.run(args);
  });
}

}  // namespace twofour
