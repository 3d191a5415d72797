// Convolutions with a filter of its own for each channel, for Python: the table of kernels and the call.
#include "depthwise_conv.h"
#include "kernels/conv_images.h"
#include "kernels/convolutions.h"
#include "native/binding.h"
#include "native/parallel.h"

namespace twofour {
namespace {

constexpr DepthwiseConvKernel kDepthwiseConvKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "depthwise_conv", __VA_ARGS__}, symbol},
#include "depthwise_conv.inc"
#undef TWOFOUR_ROW
};

void run_rows(const DepthwiseConvKernel& kernel, const Depthwise& a, int threads) {
  parallel_for(a.images * a.height.output, 1, threads, [&](int64_t begin, int64_t end) { kernel.run(a, begin, end); });
}

const ConvolutionRow kInChains{
    nullptr,
    [](const RowBase&, const Convolution&) { return int64_t{0}; },
    [](const RowBase& row, const Convolution& c) {
      const Depthwise a{c.x, reinterpret_cast<const float*>(c.weight), c.bias, c.y, c.images, c.in_channels, c.height,
                        c.width, c.activation};
      run_rows(static_cast<const DepthwiseConvKernel&>(row), a, c.threads);
    },
    [](const Border& border, const RowBase&, const Operand& weight, Convolution* c) {
      if (c->groups != c->in_channels || c->groups != c->out_channels || c->other)
        throw std::invalid_argument("no such convolution");
      c->weight = border.exactly(weight, "weight", {Type::f32}, c->height.taps * c->width.taps * c->groups).data;
    }};

}  // namespace

void bind_depthwise_conv(nb::module_& m) {
  bind_table(m, kDepthwiseConvKernels);
  add_convolutions(m, kDepthwiseConvKernels, kInChains);
  // x and y: (images, channels, height, width) with channels densest. `weight`: float32 (taps, channels). `height` and
  // `width`: taps, stride, padding, dilation.
  bind_call(m, "depthwise_conv", +[](RowOf<DepthwiseConvKernel> index, const Operand& x, const Operand& weight, const Operand& bias,
                                 const Answer& y, Axis height, Axis width, int activation, Threads threads) {
    const DepthwiseConvKernel& kernel = row(kDepthwiseConvKernels, index);
    const Border border(kernel.name);
    const View from = pixels(border, x, "input"), to = pixels(border, y, "answer");
    border.require(from.shape[0] == to.shape[0] && from.shape[1] == to.shape[1], y, "answer",
                   "as many images and channels as the input");
    const ConvAxis high = axis(height, from.shape[2], to.shape[2]), wide = axis(width, from.shape[3], to.shape[3]);
    const View taps = border.exactly(weight, "weight", {Type::f32}, high.taps * wide.taps * from.shape[1]);
    const Numbers shift = border.numbers(bias, "bias", from.shape[1]);
    if (to.count() == 0) return;
    border.require(from.count() != 0, x, "input", "pixels where the answer has some");
    const Depthwise args{floats(from), floats(taps), shift.data(), floats(to), from.shape[0], from.shape[1],
                         high, wide, conv_activation(activation)};
    const Unlocked unlocked;
    run_rows(kernel, args, threads);
  });
}

}  // namespace twofour
