// Convolutions of codes for Python: the table of kernels, how the codes of a pixel stand, the call.
#include <algorithm>

#include "../packed_codes.h"
#include "bits_conv.h"
#include "lookup_order.h"
#include "kernels/conv_images.h"
#include "native/binding.h"
#include "native/scratch.h"

namespace twofour {
namespace {

constexpr int64_t unit_of(const char* layout) { return layout[5] == 'p' ? 64 : layout[5] == 'l' ? kTablesInputs : 4; }

constexpr BitsConvKernel kBitsConvKernels[] = {
#define TWOFOUR_ROW(symbol, isa, pattern, dtype, layout, ...)                                        \
  {{#symbol, "bits_conv", isa, pattern, dtype, layout, __VA_ARGS__}, unit_of(layout), symbol##__workspace, symbol},
#include "bits_conv.inc"
#undef TWOFOUR_ROW
};

// Images of codes: uint8 (images, bytes of their head and pixels).
View pixel_codes(const Border& border, const Operand& operand, const char* role, const PixelCodes& form,
                 const std::array<int64_t, 2>& size) {
  const View view = border.dense(operand, role, {Type::u8});
  border.require(view.ndim == 2 && product_is(view.shape[1] - kCodesHead, size[0], size[1], form.bytes() + 1) &&
                     reinterpret_cast<uintptr_t>(view.data) % 8 == 0,
                 operand, role,
                 "torch.uint8 (images, " + std::to_string(kCodesHead) + " bytes, those of their pixels and one more for each)");
  return view;
}

// Whether the codes of images, so many bytes of each, are at most `most`.
bool within(const View& codes, int64_t bytes, int most) {
  bool all = true;
  for (int64_t n = 0; n < codes.shape[0]; n++) all &= codes_within(codes.data + n * codes.shape[1] + kCodesHead, bytes, most);
  return all;
}

int64_t bits_for(int most) {
  int64_t bits = 1;
  while (most >> bits != 0) bits++;
  return bits;
}

// What an answer of codes is: `numbers` as Requantised has them, in bytes; `to`: whether in planes, its greatest code, pool.
Requantised requantised(const Border& border, const Operand& numbers, const std::array<int64_t, 3>& to, int64_t padded,
                        int64_t channels) {
  const auto& [planes, most, pool] = to;
  if (!numbers.given()) return {nullptr, 0, {false, channels, 8}, 1};
  if (!(most == 1 || most == 3 || most == 7 || most == 15) || (pool != 1 && pool != 2) || (planes != 0 && planes != 1))
    throw std::invalid_argument("no such codes of an answer");
  const View view = border.exactly(numbers, "thresholds", {Type::u8}, (most + 1) * padded * 4);
  border.require(reinterpret_cast<uintptr_t>(view.data) % 4 == 0, numbers, "thresholds", "numbers of 32 bits in bytes");
  return {reinterpret_cast<const int32_t*>(view.data), static_cast<int32_t>(most),
          {planes == 1, channels, bits_for(static_cast<int>(most))}, pool};
}

}  // namespace

void bind_bits_conv(nb::module_& m) {
  bind_table(m, kBitsConvKernels);
  m.attr("bits_codes_head") = kCodesHead;
  m.attr("bits_lookups") = nb::make_tuple(kTablesInputs, kLookupsCode);
  // Of a weight that is looked up: the group of inputs, in the order of taps and channels, that stands at each place.
  m.def("bits_lookup_order", [](int64_t rows, int64_t columns, int64_t step) {
    if (rows < 1 || columns < 1 || step < 1 || rows > kMost || columns > kMost || step > kMost)
      throw std::invalid_argument("no such window");
    nb::list order;
    lookup_order(rows, columns, step, [&](int64_t y, int64_t x, int64_t q) { order.append((y * columns + x) * step + q); });
    return order;
  });
  // x: float32 (images, channels, height, width), channels densest, or codes as this row reads them, uint8 (images, bytes);
  // y the same for `to`. Returns false, without touching y, when `weight` was made for another layout or shape. `high`,
  // `wide`: taps, stride, padding, dilation; `image`, `size`: height and width of x and of the convolution's own answer. Of `to`
  // (0, 0, pool) y are the means of its pixels, or of the greatest of 2 x 2: float32 (images, out, 1, 1).
  bind_call(m, "bits_conv", +[](RowOf<BitsConvKernel> index, const Operand& x, const Operand& weight, const Operand& bias,
                                const Operand& numbers, const Operand& affine, const Operand& other, const Answer& y, int64_t in, int64_t out, Axis high, Axis wide,
                                std::array<int64_t, 2> image, std::array<int64_t, 2> size, std::array<int64_t, 3> to, bool dynamic, float x_scale,
                                int x_zero, int most, int factor, bool centred, bool relu, Threads threads) {
    static Scratch scratch;
    const BitsConvKernel& kernel = row(kBitsConvKernels, index);
    const Border border(kernel.name);
    if (in < 1 || out < 1 || in > kMost || out > kMost || std::min(image[0], image[1]) < 0 ||
        std::min(size[0], size[1]) < 1)
      throw std::invalid_argument("no such convolution");
    border.require(codes_possible(most, factor, x_zero), x, "input", "codes of 1 to 8 bits, a zero point among them");
    border.require(factor == 1 || centred || !dynamic, x, "input", "ranges around zero for odd levels");
    const bool planes = kernel.unit == 64;
    const PixelCodes form{planes, in, bits_for(most)};
    const bool coded = border.strided(x, "input", {Type::f32, Type::u8}).type == Type::u8;
    const View from = coded ? pixel_codes(border, x, "input", form, image) : pixels(border, x, "input");
    border.require(coded || (from.shape[1] == in && from.shape[2] == image[0] && from.shape[3] == image[1]), x, "input",
                   "the channels, height and width that the convolution reads");
    border.require(!numbers.given() || !dynamic, x, "input", "a static range for an answer of codes");
    border.require(!coded || (!dynamic && (planes || most == 255 || within(from, image[0] * image[1] * form.bytes(), most))), x, "input",
                   "a static range, and codes from 0 to " + std::to_string(most));
    const int64_t panel = bits_layout(kernel.layout)->panel, padded = round_up(out, panel);
    const Requantised answer = requantised(border, numbers, to, padded, out);
    const int64_t mean = numbers.given() || to[1] != 0 ? 0 : to[2], whole[] = {from.shape[0], out, size[0], size[1]};
    border.require(mean == 0 || (0 < mean && mean <= std::min({int64_t{2}, size[0], size[1]}) &&
                                 double(size[0]) * double(size[1]) * double(out) < double(1 << 29)),
                   y, "answer", "means of pixels, or of 2 x 2 of them, of images whose answers take less than 2 GB");
    const View back = numbers.given() ? pixel_codes(border, y, "answer", answer.to, {size[0] / answer.pool, size[1] / answer.pool})
                                      : pixels(border, y, "answer");
    const bool one = mean == 0 || (back.shape[2] == 1 && back.shape[3] == 1);
    border.require(back.shape[0] == from.shape[0] && one && (numbers.given() || std::equal(whole, whole + (mean == 0 ? 4 : 2), back.shape)),
                   y, "answer", "the images of the input, and channels and pixels of the answer");
    const Numbers added = border.numbers(bias, "bias", out);
    border.require(!numbers.given() || (!affine.given() && !other.given() && !relu), y, "answer", "real numbers, which more is done with");
    AfterConv after{nullptr, nullptr, nullptr, relu, mean};
    if (affine.given()) {
      const View both = border.exactly(affine, "scale and shift", {Type::f32}, 2 * out);
      after.scale = floats(both), after.shift = after.scale + out;
    }
    if (other.given()) {
      const View sum = pixels(border, other, "other");
      border.require(std::equal(sum.shape, sum.shape + 4, whole), other, "other", "the images, channels and pixels of the answer");
      after.other = floats(sum);
    }
    BitsConv args{from.data, coded, nullptr, nullptr, added.data(), back.data, from.shape[0], in,
                  out, axis(high, image[0], size[0]), axis(wide, image[1], size[1]),
                  {dynamic, x_scale, x_zero, 1.0f, 0, most, factor, centred}, answer, after, threads, nullptr};
    const int64_t taps = args.height.taps * args.width.taps, tap = tap_inputs(kernel.unit, in);
    const PackedWeight packed(border, weight);
    if (!packed.made_for(kernel.dtype, kernel.layout, out, taps * tap)) return false;
    require_codes(kernel, packed, taps * padded * 4);
    border.require(sum_fits(packed, taps * in, most), x, "input", "so few inputs that int32 holds the sum of their products");
    args.weight = packed.bytes();
    args.tap_sums = reinterpret_cast<const int32_t*>(packed.bytes() + packed.behind() - taps * padded * 4);
    const auto reach = [](const ConvAxis& a) { return double(a.output) * double(a.stride) + double(a.taps) * double(a.dilation); };
    border.require(reach(args.height) * reach(args.width) * double(form.bytes()) < double(int64_t{1} << 31), x, "input",
                   "images whose codes with their zeros take less than 2 GB");
    if (kernel.unit == kTablesInputs) {
      border.require(most <= kLookupsCode, x, "input", "codes of at most " + std::to_string(kLookupsCode));
      border.require(reach(args.width) * double(args.height.taps) * double(args.height.dilation) * double(tap / kernel.unit) * 64 <
                         kLookupsBytes, x, "input", "rows whose tables take less than 2 GB");
    }
    if (back.count() != 0) {
      const Unlocked unlocked;
      const Scratch::Lease lease(scratch, static_cast<size_t>(kernel.workspace_bytes(args)));
      args.workspace = lease.data();
      kernel.run(args);
    }
    return true;
  });
}

}  // namespace twofour
