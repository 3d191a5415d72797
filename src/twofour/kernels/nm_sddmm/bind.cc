// Sampled products for Python.
#include <cstring>

#include "native/binding.h"
#include "native/caches.h"
#include "native/integers.h"
#include "native/scratch.h"
#include "nm_sddmm.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr NmSddmmKernel kNmSddmmKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "nm_sddmm", __VA_ARGS__}, symbol},
#include "nm_sddmm.inc"
#undef TWOFOUR_ROW
};

// 16 inputs of 512 lanes are 32 KB: two thirds of 48 KB, all of 32 KB, where they would push each other out.
int64_t block_of(int64_t tokens, int64_t per_lane) {
  static const int64_t lanes = cache_bytes(1, 32 << 10) >= 48 << 10 ? 512 : 256;
  return round_up(ceil_div(tokens, ceil_div(tokens, lanes * per_lane)), 32);
}

}  // namespace

void bind_nm_sddmm(nb::module_& m) {
  bind_table(m, kNmSddmmKernels);
  m.def("nm_sddmm", [](int index, const Operand& left, const Operand& right, const Operand& indices, const Operand& values,
                       int threads) {
    const NmSddmmKernel& kernel = row(kNmSddmmKernels, index);
    const Border border(kernel.name);
    const bool pairs = std::strcmp(kernel.dtype, "bfloat16") == 0;
    const Rows gradient = border.rows(left, "left side", pairs ? Types{Type::bf16} : kReal), inputs = border.rows(right, "right side", {gradient.type});
    border.require(inputs.rows == gradient.rows && inputs.rows > 0, right, "right side", "as many tokens as the left side, one at least");
    border.require(inputs.width % 4 == 0, right, "right side", "groups of four: a last size that is a multiple of 4");
    const View codes = border.exactly(indices, "indices", {Type::u8}, gradient.width * ceil_div(inputs.width, 8));
    const View kept = border.exactly(values, "kept values", {Type::f32}, gradient.width * (inputs.width / 2));
    static Scratch scratch;
    const Unlocked unlocked;
    // Columns a power of two apart would share the sets of a cache.
    const int64_t per_lane = pairs ? 2 : 1, block = block_of(inputs.rows, per_lane), step = block / per_lane + 16;
    const Scratch::Lease lease(scratch, static_cast<size_t>(nm_sddmm_bytes(gradient.width, inputs.width, step)));
    kernel.run({gradient.data, inputs.data, gradient.type == Type::bf16, gradient.stride, inputs.stride, inputs.rows,
                gradient.width, inputs.width, reinterpret_cast<const uint8_t*>(codes.data),
                reinterpret_cast<float*>(kept.data), block, step, lease.data(), threads});
  });
}

}  // namespace twofour
