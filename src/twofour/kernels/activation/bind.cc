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

}  // namespace

void bind_activation(nb::module_& m) {
  bind_table(m, kActivationKernels);
  // `upstream` None: y = activation(x); else the gradient of x.
  m.def("activation", [](int index, int activation, const Operand& x, const Operand& upstream, const Operand& answer,
                         int threads) {
    const ActivationKernel& kernel = row(kActivationKernels, index);
    if (activation <= 0 || activation > static_cast<int>(Activation::silu))
      throw std::invalid_argument("no such activation");
    const Border border(kernel.name);
    const View from = border.dense(x, "input", kReal);
    const int64_t count = from.count();
    ActivationCall args{static_cast<Activation>(activation), from.data, nullptr, nullptr, from.type == Type::bf16, 0, 0};
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
}

}  // namespace twofour
