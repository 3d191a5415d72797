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

void run(const NormKernel& kernel, const Norm& args, int threads) {
  const Unlocked unlocked;
  // 16384 elements a share: below that, starting a thread costs more than the rows.
  const int64_t grain = args.width > 0 && args.width < 16384 ? 16384 / args.width : 1;
  parallel_for(args.rows, grain, threads, [&](int64_t begin, int64_t end) { kernel.run(args, begin, end); });
}

Rows rows_of(const Border& border, const NormKernel& kernel, const Operand& x) {
  return border.rows(x, "input", std::strcmp(kernel.dtype, "bfloat16") == 0 ? Types{Type::bf16} : Types{Type::f32});
}

}  // namespace

const NormKernel& norm_kernel(int index) { return row(kKernels, index); }

void bind_norm(nb::module_& m) {
  bind_table(m, kKernels);
  bind_call(m, "norm", +[](RowOf<NormKernel> index, const Operand& x, const Operand& weight, const Operand& bias, const Answer& y, float eps,
                   bool centred, Threads threads) {
    const NormKernel& kernel = norm_kernel(index);
    const Border border(kernel.name);
    const Rows from = rows_of(border, kernel, x);
    const View to = border.exactly(y, "answer", kReal, from.rows * from.width);
    const Numbers scale = border.numbers(weight, "weight", from.width), shift = border.numbers(bias, "bias", from.width);
    const Norm args{from.data, from.stride, scale.data(), shift.data(), to.data, to.type == Type::bf16,
                    from.rows, from.width,  eps,          centred};
    run(kernel, args, threads);
  });
  // The same with the answer as bytes by a range in `bytes`, and in y too unless that is None.
  bind_call(m, "norm_to_bytes", +[](RowOf<NormKernel> index, const Operand& x, const Operand& weight, const Operand& bias, const Answer& y,
                            const Answer& bytes, float eps, bool centred, float bytes_scale, int bytes_zero, Threads threads) {
    const NormKernel& kernel = norm_kernel(index);
    const Border border(kernel.name);
    const Rows from = rows_of(border, kernel, x);
    const View whole = border.exactly(bytes, "answer in bytes", {Type::u8}, from.rows * from.width);
    border.require(0 <= bytes_zero && bytes_zero <= 255, bytes, "answer in bytes", "a zero point from 0 to 255");
    View to{};
    if (y.given()) to = border.exactly(y, "answer", kReal, from.rows * from.width);
    const Numbers scale = border.numbers(weight, "weight", from.width), shift = border.numbers(bias, "bias", from.width);
    const Norm args{from.data, from.stride, scale.data(), shift.data(), to.data, to.type == Type::bf16,
                    from.rows, from.width,  eps,          centred,
                    reinterpret_cast<uint8_t*>(whole.data), bytes_scale, bytes_zero};
    run(kernel, args, threads);
  });
}

}  // namespace twofour
