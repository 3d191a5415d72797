// Fused products for Python: one call, its products whichever it is told.
#include <optional>

#include "fused_matmul.h"
#include "kernels/normed_rows.h"
#include "kernels/product_operands.h"
#include "native/binding.h"

namespace twofour {
namespace {

// What every one of the products reads and writes.
Types types_of(std::initializer_list<int> products) {
  Types all = kReal;
  for (const int product : products)
    if (product >= 0 && !reads(product_at(product).row->dtype).has(Type::bf16)) all = {Type::f32};
  return all;
}

}  // namespace

void bind_fused_matmul(nb::module_& m) {
  // y = epilogue(last(activation(first(x)) [* gate(x)])), or epilogue(last(x)), float32 or bfloat16, by strips of tokens.
  // `first`, `gate` and `last` are those of `products`; -1 for no gate, or for neither first nor gate. `first_activation` and
  // `hidden` are of `first`, `activation`, `combine` and `other` belong to `last`. `before` and `after`: rows of the table of
  // norms, of rows of x and of rows of y, which `normed` takes and may be; -1 for none.
  bind_call(m, "fused_matmul",
            +[](ProductAt first, ProductAt gate, ProductAt last, const Operand& x, const Operand& first_weight, const Operand& first_bias,
                const Operand& gate_weight, const Operand& gate_bias, const Operand& last_weight, const Operand& last_bias,
                const Answer& y, int64_t hidden, int first_activation, int activation, int combine, const Operand& other,
                RowOf<NormKernel> before, const Operand& before_scale, const Operand& before_shift, float before_eps, bool before_centred,
                RowOf<NormKernel> after, const Operand& after_scale, const Operand& after_shift, float after_eps, bool after_centred,
                const Answer& normed, Threads threads) {
    static Scratch scratch;
    const Border border("a fused product");
    const ProductOperands seen(border, x, last_bias, y, types_of({first, gate, last}), {}, {activation, combine}, other);
    if (first_activation < 0 || first_activation > static_cast<int>(Activation::silu)) throw std::invalid_argument("no such epilogue");
    if (first < 0 ? hidden != 0 || gate >= 0 : hidden < 1) throw std::invalid_argument("nothing between two products");
    const int64_t in = seen.from.width, out = seen.to.width;
    const Numbers one = border.numbers(first_bias, "bias", hidden), two = border.numbers(gate_bias, "bias", hidden);
    FusedMatmul all{{}, {}, part_of(border, last, last_weight, "last weight", seen.bias, out, first < 0 ? in : hidden),
                    static_cast<Activation>(first_activation), seen.epilogue, {}, {}, seen.from.type, seen.from.data,
                    seen.from.stride, seen.to.data, seen.to.data, seen.from.rows, in, threads};
    if (first >= 0) all.first = part_of(border, first, first_weight, "first weight", one, hidden, in);
    if (gate >= 0) all.gate = part_of(border, gate, gate_weight, "weight of the gate", two, hidden, in);
    std::optional<NormedRows> ahead, behind;
    if (before >= 0) {
      ahead.emplace(border, before, seen.from, before_scale, before_shift, nullptr, before_eps, before_centred);
      all.before = {ahead->kernel, ahead->norm};
    }
    if (after >= 0) {
      all.normed = border.exactly(normed, "normalised answer", Types{seen.to.type}, seen.to.rows * out).data;
      Rows of_y = seen.to;
      of_y.stride = out;
      behind.emplace(border, after, of_y, after_scale, after_shift, nullptr, after_eps, after_centred);
      all.after = {behind->kernel, behind->norm};
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
