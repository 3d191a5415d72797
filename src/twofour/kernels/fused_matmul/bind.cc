// Fused products for Python: one call, its products whichever it is told.
#include <cstring>
#include <optional>
#include <tuple>

#include "fused_matmul.h"
#include "kernels/normed_rows.h"
#include "kernels/product_operands.h"
#include "native/binding.h"

namespace twofour {
namespace {

// How a product takes and leaves whole numbers: the fields of `Quantization`.
using Codes = std::tuple<bool, float, int, float, int>;

Quantization of(const Codes& codes) { return std::make_from_tuple<Quantization>(codes); }

// What every one of the products reads and writes beside bytes.
Types types_of(std::initializer_list<int> products) {
  Types all = kReal;
  for (const int product : products)
    if (product >= 0 && !reads(product_at(product).row->dtype).has(Type::bf16)) all = {Type::f32};
  return all;
}

Types with_bytes(Types real) { return real.has(Type::bf16) ? Types{Type::f32, Type::bf16, Type::u8} : Types{Type::f32}; }

// A norm whose answer stands as bytes too.
Norm in_bytes(const Border& border, Norm norm, const Answer& whole, int64_t count, float scale, int zero) {
  norm.bytes = reinterpret_cast<uint8_t*>(border.exactly(whole, "answer in bytes", {Type::u8}, count).data);
  border.require(0 <= zero && zero <= 255, whole, "answer in bytes", "a zero point from 0 to 255");
  norm.bytes_scale = scale, norm.bytes_zero = zero;
  return norm;
}

// Whether a product reads and leaves bytes by these ranges: an int8 one, of static ones.
bool of_bytes(const Part& part) {
  const Quantization& q = part.range;
  return std::strcmp(part.product->row->dtype, "int8") == 0 && !q.dynamic && 0 <= q.x_zero && q.x_zero <= 255;
}

// Puts the ranges where they belong and refuses bytes that a product cannot read or leave, and zero points of none.
void set_ranges(const Border& border, FusedMatmul* all, const Codes& of_x, const Codes& of_held, bool held, const Operand& x,
                const Operand& last_weight) {
  (all->two() ? all->first : all->last).range = all->gate.range = of(of_x);
  if (all->two()) all->last.range = of(of_held);
  for (const Part* part : {&all->first, &all->gate, &all->last})
    if (part->product != nullptr) WholeRange(part->product->row->dtype, part->range).require(border, Type::f32, x, last_weight);
  border.require(!all->x_whole || (of_bytes(all->reader()) && (!all->two() || of_bytes(all->first))), x, "input",
                 "real: bytes are for int8 products of a static range, with zero points from 0 to 255");
  border.require(!held || (all->two() && !all->gated() && of_bytes(all->first) && of_bytes(all->last) && all->first.range.y_zero >= 0),
                 last_weight, "last weight", "of two int8 products of static ranges without a gate, between which bytes stand");
  all->held_whole = held;
}

}  // namespace

void bind_fused_matmul(nb::module_& m) {
  // y = epilogue(last(activation(first(x)) [* gate(x)])), or epilogue(last(x)), float32 or bfloat16, by strips of tokens.
  // `first`, `gate` and `last` are those of `products`; -1 for no gate, or for neither first nor gate. `first_activation` and
  // `hidden` are of `first`, `activation`, `combine` and `other` belong to `last`. `before` and `after`: rows of the table of
  // norms, of rows of x and of rows of y, which `normed` takes and may be; -1 for none. `of_x` and `of_held` are the ranges
  // of what reads x, and of `last` behind another one. x of a static range may be bytes; `held`: so is what the first one
  // answers, by its range of y. `whole` takes the answer of `after` as bytes too, or alone, where `normed` is None.
  bind_call(m, "fused_matmul",
            +[](ProductAt first, ProductAt gate, ProductAt last, const Operand& x, const Operand& first_weight, const Operand& first_bias,
                const Operand& gate_weight, const Operand& gate_bias, const Operand& last_weight, const Operand& last_bias,
                const Answer& y, int64_t hidden, int first_activation, int activation, int combine, const Operand& other,
                RowOf<NormKernel> before, const Operand& before_scale, const Operand& before_shift, float before_eps, bool before_centred,
                RowOf<NormKernel> after, const Operand& after_scale, const Operand& after_shift, float after_eps, bool after_centred,
                const Answer& normed, const Codes& of_x, const Codes& of_held, bool held, const Answer& whole, float whole_scale,
                int whole_zero, Threads threads) {
    static Scratch scratch;
    const Border border("a fused product");
    const Types real = types_of({first, gate, last});
    const ProductOperands seen(border, x, last_bias, y, with_bytes(real), real, {activation, combine}, other);
    if (first_activation < 0 || first_activation > static_cast<int>(Activation::silu)) throw std::invalid_argument("no such epilogue");
    if (first < 0 ? hidden != 0 || gate >= 0 : hidden < 1) throw std::invalid_argument("nothing between two products");
    const int64_t in = seen.from.width, out = seen.to.width;
    const Numbers one = border.numbers(first_bias, "bias", hidden), two = border.numbers(gate_bias, "bias", hidden);
    FusedMatmul all{{}, {}, part_of(border, last, last_weight, "last weight", seen.bias, out, first < 0 ? in : hidden),
                    static_cast<Activation>(first_activation), seen.epilogue, {}, {}, seen.to.type, seen.from.data,
                    seen.from.stride, seen.to.data, seen.to.data, seen.from.rows, in, threads, seen.from.type == Type::u8};
    border.require(all.x_whole || seen.from.type == seen.to.type, y, "answer", "of the input's type");
    if (first >= 0) all.first = part_of(border, first, first_weight, "first weight", one, hidden, in);
    if (gate >= 0) all.gate = part_of(border, gate, gate_weight, "weight of the gate", two, hidden, in);
    set_ranges(border, &all, of_x, of_held, held, x, last_weight);
    std::optional<NormedRows> ahead, behind;
    if (before >= 0) {
      ahead.emplace(border, before, seen.from, before_scale, before_shift, nullptr, before_eps, before_centred);
      all.before = {ahead->kernel, ahead->norm};
    }
    if (after >= 0) {
      const int64_t count = seen.to.rows * out;
      all.normed = nullptr;
      if (normed.given() || !whole.given()) all.normed = border.exactly(normed, "normalised answer", Types{seen.to.type}, count).data;
      Rows of_y = seen.to;
      of_y.stride = out;
      behind.emplace(border, after, of_y, after_scale, after_shift, nullptr, after_eps, after_centred);
      all.after = {behind->kernel, behind->norm};
      if (whole.given()) all.after.norm = in_bytes(border, behind->norm, whole, count, whole_scale, whole_zero);
    }
    if (all.tokens <= 0) return;
    bool damaged;
    {
      const Unlocked unlocked;
      damaged = FusedRun(all, scratch).run();
    }
    if (damaged) border.damaged();
  });
}

}  // namespace twofour
