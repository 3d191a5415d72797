// Activations and their gradients for Python.
#include "activation.h"
#include "native/binding.h"
#include "native/integers.h"
#include "native/parallel.h"
#include "native/unlocked.h"

namespace twofour {
namespace {

constexpr ActivationKernel kActivationKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "activation", __VA_ARGS__}, symbol},
#include "activation.inc"
#undef TWOFOUR_ROW
};

constexpr int64_t kShare = 8192;  // numbers of a task: a multiple of every vector

Activation activation_of(int code) {
  if (code <= 0 || code > static_cast<int>(Activation::silu)) throw std::invalid_argument("no such activation");
  return static_cast<Activation>(code);
}

}  // namespace

void bind_activation(nb::module_& m) {
  bind_table(m, kActivationKernels);
  // `upstream` None: y = activation(x); else the gradient of x.
  m.def("activation", [](int index, int activation, const Operand& x, const Operand& upstream, const Operand& answer,
                         int threads) {
    const ActivationKernel& kernel = row(kActivationKernels, index);
    const Activation kind = activation_of(activation);
    const Border border(kernel.name);
    const View from = border.dense(x, "input", kReal);
    const int64_t count = from.count();
    ActivationCall args{kind, from.data, nullptr, nullptr, from.type == Type::bf16, 0, 0};
    if (upstream.given()) args.upstream = border.exactly(upstream, "gradient", Types{from.type}, count).data;
    args.answer = border.exactly(answer, "answer", Types{from.type}, count).data;
    if (count == 0) return;
    const Unlocked unlocked;
    parallel_for(ceil_div(count, kShare), 1, threads, [&](int64_t begin, int64_t end) {
      ActivationCall mine = args;
      mine.begin = begin * kShare, mine.end = least(end * kShare, count);
      kernel.run(mine);
    });
  });
  // Of rows of x, (.., 2 * width), activation(first half) * second half, with `behind` first half * activation(second half).
  bind_call(m, "gated_activation", +[](RowOf<ActivationKernel> index, int activation, const Operand& x, const Answer& answer, bool behind,
                               Threads threads) {
    const ActivationKernel& kernel = row(kActivationKernels, index);
    const Activation kind = activation_of(activation);
    const Border border(kernel.name);
    const Rows from = border.rows(x, "input", kReal);
    border.require(from.width % 2 == 0, x, "input", "rows of two halves");
    const int64_t width = from.width / 2, half = width * (from.type == Type::bf16 ? 2 : 4);
    const View to = border.exactly(answer, "answer", {from.type}, from.rows * width);
    if (from.rows * width == 0) return;
    ActivationCall args{kind, from.data + (behind ? half : 0), nullptr, to.data, from.type == Type::bf16, 0, 0};
    args.gated = from.data + (behind ? 0 : half), args.width = width, args.stride = from.stride;
    const Unlocked unlocked;
    parallel_for(from.rows, ceil_div(kShare, width), threads, [&](int64_t begin, int64_t end) {
      ActivationCall mine = args;
      mine.begin = begin, mine.end = end;
      kernel.run(mine);
    });
  });
}

}  // namespace twofour
