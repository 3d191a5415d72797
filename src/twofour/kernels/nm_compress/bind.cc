// Packing for Python.
#include "native/binding.h"
#include "nm_compress.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr NmCompressKernel kNmCompressKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "nm_compress", __VA_ARGS__}, symbol},
#include "nm_compress.inc"
#undef TWOFOUR_ROW
};

}  // namespace

void bind_nm_compress(nb::module_& m) {
  bind_table(m, kNmCompressKernels);
  m.def("nm_compress", [](int index, const Operand& weight, const Operand& values, const Operand& indices, int threads) {
    const NmCompressKernel& kernel = row(kNmCompressKernels, index);
    const Border border(kernel.name);
    const Rows from = border.rows(weight, "weight", {Type::f32});
    border.require(from.width % 4 == 0, weight, "weight", "groups of four: a last size that is a multiple of 4");
    const View kept = border.exactly(values, "kept values", {Type::f32}, from.rows * (from.width / 2));
    const View codes = border.exactly(indices, "indices", {Type::u8}, from.rows * ((from.width + 7) / 8));
    const Unlocked unlocked;
    return kernel.run({reinterpret_cast<const float*>(from.data), from.stride, from.rows, from.width,
                       reinterpret_cast<float*>(kept.data), reinterpret_cast<uint8_t*>(codes.data), threads});
  });
}

}  // namespace twofour
