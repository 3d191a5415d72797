// Data gradients of convolutions for Python.
#include "kernels/conv_images.h"
#include "kernels/layouts/packed_weight.h"
#include "native/binding.h"
#include "native/scratch.h"
#include "nm_conv_gradient.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr NmConvGradientKernel kNmConvGradientKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "nm_conv_gradient", __VA_ARGS__}, symbol##__workspace, symbol},
#include "nm_conv_gradient.inc"
#undef TWOFOUR_ROW
};

// Whether every window of an axis lies in the padded pixels, the zeros behind them included.
bool fits(const ConvAxis& axis) {
  return axis.output >= 0 && axis.output <= (int64_t{1} << 30) && axis.input >= 0 && axis.input <= (int64_t{1} << 30);
}

}  // namespace

void bind_nm_conv_gradient(nb::module_& m) {
  bind_table(m, kNmConvGradientKernels);
  // gradient: a header and the layout "panels" of (images * output pixels, out channels); weight: (out, in, height, width), any
  // strides; dx: (images, in, height, width), channels densest. Returns false, without touching dx, when the bytes were made for
  // another layout or shape. `height` and `width`: taps, stride, padding, dilation; `output`: pixels of dL/dz.
  m.def("nm_conv_gradient", [](int index, const Operand& gradient, const Operand& weight, const Operand& dx, Axis height,
                               Axis width, std::array<int64_t, 2> output, int threads) {
    static Scratch scratch;
    const NmConvGradientKernel& kernel = row(kNmConvGradientKernels, index);
    const Border border(kernel.name);
    const View to = pixels(border, dx, "answer"), from = border.strided(weight, "weight", {Type::f32});
    border.require(from.ndim == 4 && from.shape[1] == to.shape[1] && from.shape[2] == height[0] && from.shape[3] == width[0] &&
                       from.shape[0] > 0 && from.shape[0] % 4 == 0 && from.shape[1] > 0,
                   weight, "weight", "(4 n outputs, the answer's channels, the taps)");
    NmConvGradient args{nullptr, floats(from), from.strides[0], from.strides[1], from.strides[2], from.strides[3], floats(to),
                        to.shape[0], to.shape[1], from.shape[0], axis(height, to.shape[2], output[0]),
                        axis(width, to.shape[3], output[1]), threads, nullptr};
    if (!fits(args.height) || !fits(args.width)) throw std::invalid_argument("no such convolution");
    require_halo(args.height, args.width, args.in_channels);
    if (to.count() == 0) return true;
    const PackedWeight packed(border, gradient, "packed gradient");
    int64_t rows;
    if (__builtin_mul_overflow(args.images, output[0] * output[1], &rows) ||
        !packed.made_for("float32", "panels", rows, args.out_channels))
      return false;
    packed.require_size(*layout_called("panels"));
    args.gradient = packed.bytes();
    const Unlocked unlocked;
    const Scratch::Lease lease(scratch, static_cast<size_t>(kernel.workspace_bytes(args)));
    args.workspace = lease.data();
    kernel.run(args);
    return true;
  });
}

}  // namespace twofour
