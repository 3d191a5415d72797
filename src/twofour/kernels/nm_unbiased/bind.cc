// Unbiased estimates for Python.
#include "kernels/layouts/packed_weight.h"
#include "kernels/layouts/panels.h"
#include "native/binding.h"
#include "native/parallel.h"
#include "native/integers.h"
#include "nm_unbiased.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr NmUnbiasedKernel kNmUnbiasedKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "nm_unbiased", __VA_ARGS__}, symbol},
#include "nm_unbiased.inc"
#undef TWOFOUR_ROW
};

}  // namespace

void bind_nm_unbiased(nb::module_& m) {
  bind_table(m, kNmUnbiasedKernels);
  // `packed`: a header that says what is wanted, of a weight (rows, tokens), and the bytes to be written behind it.
  m.def("nm_unbiased", [](int index, const Operand& gradient, uint32_t seed, const Operand& packed, int threads) {
    const NmUnbiasedKernel& kernel = row(kNmUnbiasedKernels, index);
    const Border border(kernel.name);
    const Rows from = border.rows(gradient, "gradient", kReal);
    border.require(from.rows % 4 == 0, gradient, "gradient", "tokens in groups of four");
    const PackedWeight to(border, packed, "packed estimate");
    const bool bf16 = to.made_for("bfloat16", "bf16_panels", from.width, from.rows);
    if (!bf16 && !to.made_for("float32", "panels", from.width, from.rows))
      border.refuse(packed, "packed estimate", "a header of layout panels or bf16_panels for the transposed gradient");
    to.require_size(*layout_called(bf16 ? "bf16_panels" : "panels"));
    const Unlocked unlocked;
    parallel_for(ceil_div(from.width, kPanelRows), 1, threads, [&](int64_t begin, int64_t end) {
      kernel.run({from.data, from.type == Type::bf16, from.stride, from.rows, from.width, seed, bf16, to.bytes(),
                  begin * kPanelRows, least(end * kPanelRows, from.width)});
    });
  });
}

}  // namespace twofour
