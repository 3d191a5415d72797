// Convolutions with packed weights for Python: the table of kernels and the call.
#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/conv_images.h"
#include "kernels/convolutions.h"
#include "kernels/layouts/packed_regions.h"
#include "native/binding.h"
#include "native/scratch.h"
#include "nm_conv.h"

namespace twofour {
namespace {

constexpr NmConvKernel kNmConvKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "nm_conv", __VA_ARGS__}, symbol##__workspace, symbol},
#include "nm_conv.inc"
#undef TWOFOUR_ROW
};
constexpr HybridConvKernel kHybridConvKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{{#symbol, "hybrid_conv", __VA_ARGS__}, symbol##__workspace, symbol}},
#include "hybrid_conv.inc"
#undef TWOFOUR_ROW
};

void require_groups(int64_t in, int64_t out, int64_t groups) {
  if (groups < 1 || in % groups != 0 || out % groups != 0 || in / groups % 4 != 0 || in == 0 || out == 0)
    throw std::invalid_argument("the channels make no such groups of four");
}

bool of_regions(const RowBase& row) { return std::strcmp(row.layout, "pairs") != 0; }

// Whether every group's header is that of this convolution, with as many bytes behind it as it says.
bool made_for(const RowBase& row, const PackedWeight& packed, const NmConv& a) {
  const WeightShape shape{a.out_channels / a.groups, a.in_channels / a.groups * a.height.taps * a.width.taps, 0, false};
  if (of_regions(row))
    return a.groups == 1 && packed.made_for(row.dtype, row.layout, shape.out, shape.in) && regions_fit(packed, row.layout) &&
           Regions{packed.bytes()}.sound(shape.in);
  const int64_t each = layout_called("pairs")->bytes(shape) + int64_t{sizeof(LayoutHeader)};
  if (a.weight_bytes != each || packed.behind() + int64_t{sizeof(LayoutHeader)} != each * a.groups) return false;
  for (int64_t group = 0; group < a.groups; group++)
    if (!reinterpret_cast<const LayoutHeader*>(a.weight - sizeof(LayoutHeader) + group * each)
             ->made_for("float32", "pairs", shape.out, shape.in))
      return false;
  return true;
}

// The call on the 2:4 weight that stands in one of two regions.
NmConv opened(const RowBase& row, NmConv a) {
  if (!of_regions(row)) return a;
  const Regions regions{a.weight};
  a.twice = regions.groups(), a.twice_count = regions.dense(), a.weight = regions.weight();
  return a;
}

NmConv packed_conv(const Convolution& c) {
  return {c.x, c.weight, c.weight_bytes, c.bias, c.other, c.y, c.images, c.in_channels, c.out_channels, c.groups,
          c.height, c.width, c.activation, c.threads, c.workspace, c.damaged};
}

const NmConvKernel& kernel_of(const RowBase& row) { return static_cast<const NmConvKernel&>(row); }

const ConvolutionRow kInChains{
    nullptr,
    [](const RowBase& row, const Convolution& c) { return kernel_of(row).workspace_bytes(opened(row, packed_conv(c))); },
    [](const RowBase& row, const Convolution& c) { kernel_of(row).run(opened(row, packed_conv(c))); },
    [](const Border& border, const RowBase& row, const Operand& weight, Convolution* c) {
      require_groups(c->in_channels, c->out_channels, c->groups);
      const PackedWeight packed(border, weight);
      c->weight = packed.bytes(), c->weight_bytes = (packed.behind() + int64_t{sizeof(LayoutHeader)}) / c->groups;
      if (!made_for(row, packed, packed_conv(*c)))
        border.refuse(weight, "weight", std::string("layout '") + row.layout + "' of this convolution");
    }};

// x and y: (images, channels, height, width) with channels densest. `weight`: one header and layout per group, one after the
// other. Returns false, without touching y, when it was made for another layout or shape. `height` and `width`: taps, stride,
// padding, dilation.
bool convolve(const NmConvKernel& kernel, const Operand& x, const Operand& weight, const Operand& bias, const Operand& other,
              const Answer& y, int64_t groups, const Axis& height, const Axis& width, int activation, int threads) {
  static Scratch scratch;
  const Border border(kernel.name);
  const View from = pixels(border, x, "input"), to = pixels(border, y, "answer");
  border.require(from.shape[0] == to.shape[0], y, "answer", "as many images as the input");
  const int64_t in = from.shape[1], out = to.shape[1];
  require_groups(in, out, groups);
  const Numbers shift = border.numbers(bias, "bias", out);
  const View added = other.given() ? pixels(border, other, "second operand") : View{};
  border.require(!other.given() || std::equal(added.shape, added.shape + 4, to.shape), other, "second operand",
                 "the answer's shape");
  const PackedWeight packed(border, weight);
  NmConv args{floats(from), packed.bytes(), (packed.behind() + int64_t{sizeof(LayoutHeader)}) / groups,
              shift.data(), floats(added), floats(to), from.shape[0], in, out, groups,
              axis(height, from.shape[2], to.shape[2]), axis(width, from.shape[3], to.shape[3]),
              conv_activation(activation), threads, nullptr, nullptr};
  require_halo(args.height, args.width, in);
  if (!made_for(kernel, packed, args)) return false;
  args = opened(kernel, args);
  bool damaged = false;
  args.damaged = &damaged;
  if (to.count() != 0) {
    const Unlocked unlocked;
    const Scratch::Lease lease(scratch, static_cast<size_t>(kernel.workspace_bytes(args)));
    args.workspace = lease.data();
    kernel.run(args);
  }
  if (damaged) border.damaged();
  return true;
}

}  // namespace

void bind_nm_conv(nb::module_& m) {
  m.attr("conv_block") = kConvBlock;
  m.attr("conv_taps") = kConvTaps;
  bind_table(m, kNmConvKernels);
  bind_table(m, kHybridConvKernels);
  add_convolutions(m, kNmConvKernels, kInChains);
  add_convolutions(m, kHybridConvKernels, kInChains);
  bind_call(m, "nm_conv", +[](RowOf<NmConvKernel> index, const Operand& x, const Operand& weight, const Operand& bias, const Operand& other,
                      const Answer& y, int64_t groups, Axis height, Axis width, int activation, Threads threads) {
    return convolve(row(kNmConvKernels, index), x, weight, bias, other, y, groups, height, width, activation, threads);
  });
  bind_call(m, "hybrid_conv", +[](RowOf<HybridConvKernel> index, const Operand& x, const Operand& weight, const Operand& bias,
                      const Operand& other, const Answer& y, int64_t groups, Axis height, Axis width, int activation, Threads threads) {
    return convolve(row(kHybridConvKernels, index), x, weight, bias, other, y, groups, height, width, activation, threads);
  });
}

}  // namespace twofour
