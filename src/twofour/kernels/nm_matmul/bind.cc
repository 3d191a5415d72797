// Products by packed weights for Python: the table of kernels, the layouts, the call.
#include <nanobind/stl/string.h>

#include <string>

#include "layout.h"
#include "layout_header.h"
#include "native/binding.h"
#include "native/parallel.h"
#include "native/scratch.h"
#include "native/whole.h"
#include "nm_matmul.h"

namespace nb = nanobind;

namespace twofour {
namespace {

const Layout& layout_of(const std::string& name) {
  const Layout* layout = layout_called(name.c_str());
  if (layout == nullptr) throw nb::value_error("no such layout");
  return *layout;
}

const NmMatmulKernel& kernel_at(int index) {
  if (index < 0 || index >= kNmMatmulKernelCount) throw nb::index_error("no such kernel row");
  return kNmMatmulKernels[index];
}

void bind_refill(nb::module_& m) {
  m.def("layout_refills", [](const std::string& layout) { return layout_of(layout).refill != nullptr; });
  // Rows are shared among the threads in whole blocks. `from` is the weight as kernels see it: row_step from row to row.
  m.def("layout_refill", [](const std::string& layout, uintptr_t from, bool bf16, int64_t row_step,
                            int64_t column_step, int64_t rows, int64_t columns, uintptr_t packed, int threads) {
    const Layout& kind = layout_of(layout);
    if (kind.refill == nullptr) throw nb::value_error("no refill for this layout");
    nb::gil_scoped_release release;
    const WeightShape shape{rows, columns, 0, false};
    parallel_for(ceil_div(rows, kRefillRows), 1, threads, [&](int64_t begin, int64_t end) {
      kind.refill(shape, {pointer<const void>(from), bf16, row_step, column_step}, begin * kRefillRows,
                  least(end * kRefillRows, rows), pointer<void>(packed));
    });
  });
}

void bind_layouts(nb::module_& m) {
  bind_refill(m);
  m.def("layout_dtype", [](const std::string& layout) { return std::string(layout_of(layout).dtype); });
  m.def("layout_bytes", [](const std::string& layout, int64_t rows, int64_t columns, int64_t group, bool zeros) {
    return layout_of(layout).bytes({rows, columns, group, zeros});
  });
  m.def("layout_pack", [](const std::string& layout, uintptr_t values, uintptr_t indices, uintptr_t scales,
                          uintptr_t zeros, int64_t rows, int64_t columns, int64_t group, uintptr_t packed) {
    const Layout& kind = layout_of(layout);
    nb::gil_scoped_release release;
    kind.pack({rows, columns, group, zeros != 0},
              {pointer<const void>(values), pointer<const uint8_t>(indices), pointer<const float>(scales),
               pointer<const float>(zeros)},
              pointer<void>(packed));
  });
  m.def("layout_unpack", [](const std::string& layout, uintptr_t packed, int64_t rows, int64_t columns, int64_t group,
                            uintptr_t values, uintptr_t indices, uintptr_t scales, uintptr_t zeros) {
    const Layout& kind = layout_of(layout);
    nb::gil_scoped_release release;
    kind.unpack({rows, columns, group, zeros != 0}, pointer<const void>(packed),
                {pointer<void>(values), pointer<uint8_t>(indices), pointer<float>(scales), pointer<float>(zeros)});
  });
}

// Kernels that take activations transposed; the others have no such loops.
bool takes_columns(const NmMatmulKernel& kernel) {
  const std::string layout = kernel.layout;
  return layout == "panels" || layout == "pairs" || layout == "bf16_panels";
}

void bind_columns(nb::module_& m) {
  // y (out, tokens) = W x, x (in, tokens): as nm_matmul with both transposed. Types are float32 or bfloat16.
  m.def("nm_matmul_columns", [](int index, uintptr_t x, int x_type, int64_t x_stride, uintptr_t weight, uintptr_t y,
                                int y_type, int64_t y_stride, int64_t tokens, int64_t out_features,
                                int64_t in_features, int threads) {
    static Scratch scratch;
    const NmMatmulKernel& kernel = kernel_at(index);
    const auto* head = pointer<const LayoutHeader>(weight);
    if (!takes_columns(kernel) || !head->made_for(kernel.dtype, kernel.layout, out_features, in_features)) return false;
    nb::gil_scoped_release release;
    NmMatmul args{pointer<const void>(x), static_cast<Type>(x_type), x_stride, head + 1, nullptr, pointer<void>(y),
                  static_cast<Type>(y_type), y_stride, tokens, out_features, in_features, 0, false,
                  {Activation::none, Combine::none, nullptr, 0}, {true, 0, 0, 0, 0}, threads, nullptr, true};
    const Scratch::Lease lease(scratch, static_cast<size_t>(kernel.workspace_bytes(args)));
    args.workspace = lease.data();
    kernel.run(args);
    return true;
  });
}

}  // namespace

void bind_nm_matmul(nb::module_& m) {
  bind_layouts(m);
  m.def("nm_matmul_rows", [] {
    nb::list rows;
    for (int i = 0; i < kNmMatmulKernelCount; ++i) {
      const NmMatmulKernel& k = kNmMatmulKernels[i];
      rows.append(nb::make_tuple(k.name, k.isa, k.dtype, k.layout, k.tokens_min, k.tokens_max));
    }
    return rows;
  });
  // Returns false, without touching y, when `weight` was made for another layout or shape. y is contiguous.
  m.def("nm_matmul", [](int index, uintptr_t x, int x_type, int64_t x_stride, uintptr_t weight, uintptr_t bias,
                        uintptr_t y, int y_type, int64_t tokens, int64_t out_features, int64_t in_features,
                        int activation, int combine, uintptr_t other, int64_t other_stride, bool dynamic, float x_scale,
                        int x_zero, float y_scale, int y_zero, int threads) {
    static Scratch scratch;
    const NmMatmulKernel& kernel = kernel_at(index);
    const auto* head = pointer<const LayoutHeader>(weight);
    if (!head->made_for(kernel.dtype, kernel.layout, out_features, in_features)) return false;
    nb::gil_scoped_release release;
    NmMatmul args{pointer<const void>(x), static_cast<Type>(x_type), x_stride, head + 1, pointer<const float>(bias),
                  pointer<void>(y), static_cast<Type>(y_type), out_features, tokens, out_features, in_features,
                  head->group & ~kZerosBit, (head->group & kZerosBit) != 0,
                  {static_cast<Activation>(activation), static_cast<Combine>(combine), pointer<const void>(other),
                   other_stride},
                  {dynamic, x_scale, x_zero, y_scale, y_zero}, threads, nullptr};
    const Scratch::Lease lease(scratch, static_cast<size_t>(kernel.workspace_bytes(args)));
    args.workspace = lease.data();
    kernel.run(args);
    return true;
  });
  bind_columns(m);
}

}  // namespace twofour
