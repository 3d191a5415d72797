// Convolutions with packed weights for Python: the table of kernels and the call.
#include "kernels/nm_matmul/layout_header.h"
#include "native/binding.h"
#include "native/scratch.h"
#include "nm_conv.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr NmConvKernel kNmConvKernels[] = {
#define TWOFOUR_NM_CONV_ROW(symbol, isa) {#symbol, isa, symbol##__workspace, symbol},
#include "nm_conv.inc"
#undef TWOFOUR_NM_CONV_ROW
};

}  // namespace

void bind_nm_conv(nb::module_& m) {
  m.attr("conv_block") = kConvBlock;
  m.attr("conv_taps") = kConvTaps;
  m.def("nm_conv_rows", [] {
    nb::list rows;
    for (const auto& k : kNmConvKernels) rows.append(nb::make_tuple(k.name, k.isa));
    return rows;
  });
  // `weight`: one header and layout per group, `weight_bytes` apart. Returns false, without touching y, when it was
  // made for another layout or shape. `height` and `width`: input, output, taps, stride, padding, dilation.
  m.def("nm_conv", [](int index, uintptr_t x, uintptr_t weight, int64_t weight_bytes, uintptr_t bias, uintptr_t other,
                      uintptr_t y, int64_t images, int64_t in_channels, int64_t out_channels, int64_t groups,
                      nb::tuple height, nb::tuple width, bool relu, int threads) {
    static Scratch scratch;
    const NmConvKernel& kernel = row(kNmConvKernels, index);
    const auto axis = [](const nb::tuple& t) {
      const auto at = [&](size_t i) { return nb::cast<int64_t>(t[i]); };
      return ConvAxis{at(0), at(1), at(2), at(3), at(4), at(5)};
    };
    NmConv args{pointer<const float>(x), pointer<const char>(weight), weight_bytes, pointer<const float>(bias),
                pointer<const float>(other), pointer<float>(y), images, in_channels, out_channels, groups,
                axis(height), axis(width), relu, threads, nullptr};
    const int64_t columns = in_channels / groups * args.height.taps * args.width.taps;
    for (int64_t group = 0; group < groups; group++)
      if (!reinterpret_cast<const LayoutHeader*>(args.weight + group * weight_bytes)
               ->made_for("float32", "pairs", out_channels / groups, columns))
        return false;
    args.weight += sizeof(LayoutHeader);
    nb::gil_scoped_release release;
    const Scratch::Lease lease(scratch, static_cast<size_t>(kernel.workspace_bytes(args)));
    args.workspace = lease.data();
    kernel.run(args);
    return true;
  });
}

}  // namespace twofour
