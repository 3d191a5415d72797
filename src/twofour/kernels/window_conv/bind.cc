// Convolutions in whole numbers for Python: the table of kernels and the call.
#include "window_conv.h"

#include <algorithm>
#include <cstring>

#include "kernels/conv_images.h"
#include "kernels/product_operands.h"
#include "kernels/products.h"
#include "native/binding.h"
#include "native/scratch.h"

namespace twofour {
namespace {

constexpr WindowConvKernel kWindowConvKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "window_conv", __VA_ARGS__}, symbol##__workspace, symbol},
#include "window_conv.inc"
#undef TWOFOUR_ROW
};

bool is_sparse(const RowBase& row) { return std::strcmp(row.pattern, "2:4") == 0; }

// Holds the bytes of a weight against its header, as a product of the same layout has it.
void require_weight(const RowBase& row, const PackedWeight& packed) {
  for (const Product& product : products())
    if (std::strcmp(product.row->layout, row.layout) == 0) return product.require(*product.row, packed);
  throw std::logic_error("no product reads the layout of a convolution");
}

}  // namespace

void bind_window_conv(nb::module_& m) {
  bind_table(m, kWindowConvKernels);
  // x and y: (images, channels, height, width) with channels densest; x float32, bfloat16, or of a static range uint8; y float32,
  // bfloat16, uint8 or int8; `other`: float32, bfloat16 or None. `weight` is (out, inputs
  // of a window), tap by tap. `height` and `width`: taps, stride, padding, dilation. Returns false, without touching y, when the
  // weight was made for another layout or shape.
  bind_call(m, "window_conv", +[](RowOf<WindowConvKernel> index, const Operand& x, const Operand& weight, const Operand& bias,
                                  const Operand& other, const Answer& y, Axis height, Axis width, int activation, bool dynamic,
                                  float x_scale, int x_zero, float y_scale, int y_zero, Threads threads) {
    static Scratch scratch;
    const WindowConvKernel& kernel = row(kWindowConvKernels, index);
    const Border border(kernel.name);
    const WholeRange range(kernel.dtype, {dynamic, x_scale, x_zero, y_scale, y_zero});
    const View from = pixels(border, x, "input", kInt8Reads), to = pixels(border, y, "answer", kInt8Writes);
    border.require(from.shape[0] == to.shape[0], y, "answer", "as many images as the input");
    range.require(border, from.type, x, weight);
    const View added = other.given() ? pixels(border, other, "second operand", kReal) : View{};
    border.require(!other.given() || std::equal(added.shape, added.shape + 4, to.shape), other, "second operand",
                   "the answer's shape");
    const ConvActivation does = conv_activation(activation);
    if (other.given() && does.passes()) throw std::invalid_argument("no such activation");
    const Windows windows{from.shape[0], from.shape[1], axis(height, from.shape[2], to.shape[2]),
                          axis(width, from.shape[3], to.shape[3]), added.type, does.most};
    require_halo(windows.height, windows.width, windows.channels);
    border.require(windows.channels > 0 && (!is_sparse(kernel) || windows.channels % 4 == 0), x, "input",
                   "channels, of a 2:4 weight in groups of four");
    const int64_t out = to.shape[1], in = windows.inputs();
    const Numbers shift = border.numbers(bias, "bias", out);
    const PackedWeight packed(border, weight);
    if (!packed.made_for(kernel.dtype, kernel.layout, out, in)) return false;
    require_weight(kernel, packed);
    if (to.count() == 0) return true;
    bool damaged = false;
    WindowConv call{{from.data, from.type, in, packed.bytes(), shift.data(), to.data, to.type, out,
                     to.shape[0] * to.shape[2] * to.shape[3], out, in, 0, false,
                     {does.kind, other.given() ? Combine::add : Combine::none, added.data, out},
                     range.quantization, threads, nullptr, &damaged},
                    windows};
    {
      const Unlocked unlocked;
      const Scratch::Lease lease(scratch, static_cast<size_t>(kernel.workspace_bytes(call)));
      call.product.workspace = lease.data();
      kernel.run(call);
    }
    if (damaged) border.damaged();
    return true;
  });
}

}  // namespace twofour
