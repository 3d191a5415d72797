// Normalisation for Python: the rows and the call.
#include <cstring>

#include "native/binding.h"
#include "native/parallel.h"
#include "norm.h"

namespace twofour {
namespace {

constexpr NormKernel kKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "norm", __VA_ARGS__}, symbol},
#include "norm.inc"
#undef TWOFOUR_ROW
};

}  // namespace

const NormKernel& norm_kernel(int index) { return row(kKernels, index); }

void bind_norm(nb::module_& m) {
  bind_table(m, kKernels);
  bind_call(m, "norm", +[](RowOf<NormKernel> index, const Operand& x, const Operand& weight, const Operand& bias, const Answer& y, float eps,
                   bool centred, Threads threads) {
    const NormKernel& kernel = norm_kernel(index);
    const Border border(kernel.name);
    const bool bf16 = std::strcmp(kernel.dtype, "bfloat16") == 0;
    const Rows from = border.rows(x, "input", bf16 ? Types{Type::bf16} : Types{Type::f32});
    const View to = border.exactly(y, "answer", kReal, from.rows * from.width);
    const Numbers scale = border.numbers(weight, "weight", from.width), shift = border.numbers(bias, "bias", from.width);
    const Norm args{from.data, from.stride, scale.data(), shift.data(), to.data, to.type == Type::bf16,
                    from.rows, from.width,  eps,          centred};
    const Unlocked unlocked;
    // 16384 elements a share: below that, starting a thread costs more than the rows.
    const int64_t grain = from.width > 0 && from.width < 16384 ? 16384 / from.width : 1;
    parallel_for(from.rows, grain, threads, [&](int64_t begin, int64_t end) { kernel.run(args, begin, end); });
  });
}

}  // namespace twofour
