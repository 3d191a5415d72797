// Squeeze-and-excite for Python: the table of kernels and the call.
#include "kernels/conv_images.h"
#include "native/binding.h"
#include "native/scratch.h"
#include "squeeze_excite.h"

namespace twofour {
namespace {

constexpr SqueezeExciteKernel kSqueezeExciteKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "squeeze_excite", __VA_ARGS__}, symbol},
#include "squeeze_excite.inc"
#undef TWOFOUR_ROW
};

}  // namespace

void bind_squeeze_excite(nb::module_& m) {
  bind_table(m, kSqueezeExciteKernels);
  // x and y: (images, channels, height, width) with channels densest. `reduce` and `expand`: float32 (squeezed, channels).
  bind_call(m, "squeeze_excite", +[](RowOf<SqueezeExciteKernel> index, const Operand& x, const Operand& reduce, const Operand& reduce_bias,
                                 const Operand& expand, const Operand& expand_bias, const Answer& y, int activation,
                                 int gate, Threads threads) {
    static Scratch scratch;
    const SqueezeExciteKernel& kernel = row(kSqueezeExciteKernels, index);
    const Border border(kernel.name);
    const View from = pixels(border, x, "input"), to = pixels(border, y, "answer");
    for (int i = 0; i < 4; i++) border.require(from.shape[i] == to.shape[i], y, "answer", "the input's shape");
    const int64_t channels = from.shape[1];
    const View first = border.dense(reduce, "first weight", {Type::f32});
    border.require(first.ndim == 2 && first.shape[1] == channels, reduce, "first weight", "(squeezed, channels)");
    const int64_t squeezed = first.shape[0];
    const View second = border.exactly(expand, "second weight", {Type::f32}, squeezed * channels);
    const Numbers shift = border.numbers(reduce_bias, "first bias", squeezed);
    const Numbers last = border.numbers(expand_bias, "second bias", channels);
    if (activation < 0 || activation > static_cast<int>(Activation::silu)) throw std::invalid_argument("no such activation");
    if (gate < 0 || gate > static_cast<int>(Gate::hardsigmoid)) throw std::invalid_argument("no such gate");
    if (to.count() == 0) return;
    SqueezeExcite args{floats(from), floats(first), shift.data(), floats(second), last.data(), floats(to), from.shape[0],
                       from.shape[2] * from.shape[3], channels, squeezed, static_cast<Activation>(activation),
                       static_cast<Gate>(gate), threads, nullptr};
    const Scratch::Lease lease(scratch, static_cast<size_t>(args.floats()) * sizeof(float));
    args.workspace = static_cast<float*>(lease.data());
    const Unlocked unlocked;
    kernel.run(args);
  });
}

}  // namespace twofour
