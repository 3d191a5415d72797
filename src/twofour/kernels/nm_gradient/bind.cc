// Pruned gradients for Python.
#include "kernels/layouts/packed_weight.h"
#include "native/binding.h"
#include "native/parallel.h"
#include "nm_gradient.h"
#include "tasks.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr NmGradientKernel kNmGradientKernels[] = {
#define TWOFOUR_ROW(symbol, ...) {{#symbol, "nm_gradient", __VA_ARGS__}, symbol},
#include "nm_gradient.inc"
#undef TWOFOUR_ROW
};

GradientMode mode_of(int mode) {
  if (mode < 0 || mode > static_cast<int>(GradientMode::unbiased)) throw std::invalid_argument("no such mode");
  return static_cast<GradientMode>(mode);
}

void run_tasks(const NmGradientKernel& kernel, const NmGradient& args) {
  if (args.samples * args.tokens <= 0 || args.columns <= 0) return;
  const Unlocked unlocked;
  parallel_for(GradientTasks(args).count(), 1, args.threads, [&](int64_t begin, int64_t end) {
    NmGradient mine = args;
    mine.begin = begin;
    mine.end = end;
    kernel.run(mine);
  });
}

// Where the answer goes.
void* answer(const Border& border, const Operand& out, const Rows& from, bool packed) {
  if (!packed) return border.exactly(out, "answer", Types{from.type}, from.rows * from.width).data;
  const bool bf16 = from.type == Type::bf16;
  const char *dtype = bf16 ? "bfloat16" : "float32", *layout = bf16 ? "bf16_panels" : "panels";
  const PackedWeight to(border, out, "packed answer");
  border.require(to.made_for(dtype, layout, from.rows, from.width), out, "packed answer",
                 std::string("a header of layout ") + layout + " for the gradient");
  to.require_size(*layout_called(layout));
  return to.bytes();
}

}  // namespace

void bind_nm_gradient(nb::module_& m) {
  bind_table(m, kNmGradientKernels);
  // `out`: of the gradient's type and size; or, `packed`, a header that says what is wanted and the bytes behind it.
  m.def("nm_gradient", [](int index, const Operand& gradient, int mode, float eps, uint32_t seed, const Operand& out,
                          bool packed, int threads) {
    const NmGradientKernel& kernel = row(kNmGradientKernels, index);
    const Border border(kernel.name);
    const View seen = border.strided(gradient, "gradient", kReal);
    const Rows from = border.rows(gradient, "gradient", kReal);
    border.require(seen.ndim == 3 && from.width % 4 == 0, gradient, "gradient", "(samples, tokens, 4 n channels)");
    run_tasks(kernel, {from.data, from.type == Type::bf16, from.stride, seen.shape[0], seen.shape[1], from.width,
                       mode_of(mode), eps, seed, answer(border, out, from, packed), packed, threads, 0, 0, {}});
  });
  // The same of dL/dz = dL/dy times the derivative of an activation at `at`, which is written to `gradient` on the way;
  // `out` None: that alone.
  m.def("nm_gradient_through", [](int index, int activation, const Operand& upstream, const Operand& at,
                                  const Operand& gradient, int mode, float eps, uint32_t seed,
                                  const Operand& out, bool packed, int threads) {
    const NmGradientKernel& kernel = row(kNmGradientKernels, index);
    if (activation <= 0 || activation > static_cast<int>(Activation::silu))
      throw std::invalid_argument("no such activation");
    const Border border(kernel.name);
    const View seen = border.dense(gradient, "gradient", kReal);
    const Rows from = border.rows(gradient, "gradient", kReal);
    border.require(seen.ndim == 3 && from.width % 4 == 0, gradient, "gradient", "(samples, tokens, 4 n channels)");
    const int64_t count = from.rows * from.width;
    const void* dy = border.exactly(upstream, "gradient of the activation's output", Types{from.type}, count).data;
    const void* z = border.exactly(at, "input of the activation", Types{from.type}, count).data;
    run_tasks(kernel, {from.data, from.type == Type::bf16, from.width, seen.shape[0], seen.shape[1], from.width,
                       out.given() ? mode_of(mode) : GradientMode::magnitude, eps, seed,
                       out.given() ? answer(border, out, from, packed) : nullptr, out.given() && packed, threads, 0, 0,
                       {static_cast<Activation>(activation), dy, z, from.data}});
  });
}

}  // namespace twofour
