// Products of codes for Python: the table of kernels, the sizes of the layouts, the call.
#include "bits_matmul.h"
#include "coded_answer.h"
#include "kernels/product_operands.h"
#include "native/binding.h"
#include "packed_codes.h"

namespace twofour {
namespace {

constexpr BitsMatmulKernel kBitsMatmulKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{{#symbol, "bits_matmul", __VA_ARGS__}, symbol##__workspace, symbol}},
#include "bits_matmul.inc"
#undef TWOFOUR_ROW
};

// Codes that are given must be those of the width.
bool within(const Rows& codes, int most) {
  bool all = true;
  for (int64_t r = 0; r < codes.rows; r++) all &= codes_within(codes.data + r * codes.stride, codes.width, most);
  return all;
}

// What makes codes of an answer, from 0 to `most`: rounded ones from `least` on, or by a table of steps.
CodedAnswer coded_answer(const Border& border, const Operand& affine, const Operand& steps, int64_t out, std::array<int, 2> codes,
                         float margin) {
  const auto [least, most] = codes;
  CodedAnswer made{least, most, nullptr, nullptr, 0, 0, 0, nullptr, nullptr, margin};
  if (affine.given()) {
    const View both = border.exactly(affine, "scale and shift", {Type::f32}, 2 * out);
    made.scale = reinterpret_cast<const float*>(both.data);
    made.shift = made.scale + out;
  }
  if (!steps.given()) return made;
  const View view = border.dense(steps, "steps", {Type::u8});
  const char* bytes = view.data;
  constexpr int64_t row_bytes = kBitsOfRow / 8, most_rows = 256;
  const auto size = static_cast<int64_t>(sizeof(CodeStepsHead));
  border.require(view.count() >= size && reinterpret_cast<uintptr_t>(bytes) % 4 == 0, steps, "steps", "a head of 16 bytes");
  const auto& head = *reinterpret_cast<const CodeStepsHead*>(bytes);
  const int64_t of_steps = int64_t{head.count} * static_cast<int64_t>(sizeof(CodeStep));
  border.require(head.count > 0 && head.count <= 1 << 16 && head.rows > 0 && head.rows <= most_rows &&
                     view.count() == size + of_steps + head.rows * row_bytes,
                 steps, "steps", "as many bytes as their head says");
  made.factor = head.factor;
  made.offset = head.offset;
  made.count = head.count;
  made.steps = reinterpret_cast<const CodeStep*>(bytes + size);
  made.bits = reinterpret_cast<const uint32_t*>(bytes + size + of_steps);
  bool sound = true;
  for (int32_t i = 0; i < head.count; i++) {
    const CodeStep& step = made.steps[i];
    sound &= step.below <= most && step.above <= most && step.row + step.rows <= head.rows &&
             step.begin <= INT32_MAX - most_rows * kBitsOfRow;
  }
  border.require(sound, steps, "steps", "codes of the answer, rows of bits that are there");
  return made;
}

}  // namespace

void bind_bits_matmul(nb::module_& m) {
  bind_table(m, kBitsMatmulKernels);
  nb::dict panels;  // outputs of a panel of each layout
  for (const BitsLayout& layout : kBitsLayouts) panels[layout.name] = layout.panel;
  m.attr("bits_panels") = panels;
  // of groups of inputs: their multiple, the most inputs of one, the most where one scale serves all inputs
  m.attr("bits_groups") = nb::make_tuple(kLeastGroup, kLargestGroup, kMostInGroup);
  // Of a layout for (rows, columns) codes of `bits` bits: outputs of a panel, where scales, sums and weights begin, and the
  // layout ends, in bytes behind the header.
  m.def("bits_places", [](const std::string& name, int64_t rows, int64_t columns, int64_t bits, int64_t group,
                          bool shifted) {
    const BitsLayout* layout = bits_layout(name.c_str());
    if (!layout || !layout->takes(bits) || columns < 1 || group < 0) throw std::invalid_argument("no such layout of codes");
    const BitsPlaces places(*layout, rows, columns, bits, group, shifted);
    return nb::make_tuple(layout->panel, places.scales, places.sums, places.weights, places.end);
  });
  // Returns false, without touching y, when `weight` was made for another layout or shape. y is contiguous. x: real, or codes
  // up to `most`, which stand for x_scale * (factor * u - x_zero); `centred`: dynamic ranges lie around zero. factor 0: x
  // stays real, which rows with groups take. `marked`: a byte behind each row of codes says whether the token is NaN.
  // `coded`: the least and the greatest code that answers become, with a mark behind each row; none where that is negative.
  // Then an activation is that of the steps, and `margin` that of CodedAnswer.
  bind_call(m, "bits_matmul", +[](RowOf<BitsMatmulKernel> index, const Operand& x, const Operand& weight, const Operand& bias,
                                  const Answer& y, int activation, int combine, const Operand& other, const Operand& affine,
                                  const Operand& steps, bool marked, std::array<int, 2> coded, float margin, bool dynamic,
                                  float x_scale, int x_zero, float y_scale, int y_zero, int most, int factor, bool centred, Threads threads) {
    const BitsMatmulKernel& kernel = row(kBitsMatmulKernels, index);
    const Border border(kernel.name);
    const bool hands_on = coded[1] >= 0;
    const ProductOperands seen(border, x, bias, y, kInt8Reads, kInt8Writes, {activation, combine}, other, {marked, hands_on});
    const PackedWeight packed(border, weight);
    if (!packed.made_for(kernel.dtype, kernel.layout, seen.to.width, seen.from.width)) return false;
    require_codes(kernel, packed);
    border.require(codes_possible(most, factor, x_zero) && -128 <= y_zero && y_zero <= 255, x, "input",
                   "codes of 1 to 8 bits, a zero point among them");
    const bool codes = seen.from.type == Type::u8, grouped = bits_layout(kernel.layout)->grouped;
    border.require(factor != 0 || (grouped && dynamic && !codes && !centred), x, "input",
                   "codes, of a row whose weight has no groups");
    border.require(!codes || !dynamic, x, "input", "a static range for an input of torch.uint8");
    const int64_t products = packed.group() > 0 ? packed.group() : packed.head().columns;
    border.require((!grouped || products <= kMostInGroup) &&
                       sum_fits(packed, products, factor == 0 ? kLargestDigit : most), x, "input",
                   "so few inputs that int32 holds the sum of their products");
    border.require(factor != 2 || centred || !dynamic, x, "input", "ranges around zero for odd levels");
    border.require(!codes || marked || most == 255 || within(seen.from, most), x, "input",
                   "codes from 0 to " + std::to_string(most));
    border.require(!marked || codes, x, "input", "codes, where a mark stands behind them");
    Matmul call = seen.call(packed, {dynamic, x_scale, x_zero, y_scale, y_zero, most, factor, centred}, threads);
    call.marked = marked;
    if (!hands_on) {
      border.require(!affine.given() && !steps.given(), y, "answer", "codes, where something makes them");
      run_product(border, kernel, call);
      return true;
    }
    border.require(0 <= coded[0] && coded[0] <= coded[1] && coded[1] <= 255 && 0 <= y_zero && seen.to.type == Type::u8 &&
                       call.epilogue.combine == Combine::none && (steps.given() || activation == 0),
                   y, "answer", "codes in torch.uint8, with no epilogue of real numbers");
    const CodedAnswer answer = coded_answer(border, affine, steps, seen.to.width, coded, margin);
    call.coded = &answer;
    run_product(border, kernel, call);
    return true;
  });
}

}  // namespace twofour
