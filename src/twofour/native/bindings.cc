// The compiled extension: kernel tables and raw-pointer calls. No torch in here; Python owns tensors and checks them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <string>

#include "isa.h"
#include "kernels/nm_compress/nm_compress.h"
#include "kernels/nm_matmul/layout.h"
#include "kernels/nm_matmul/nm_matmul.h"
#include "parallel.h"
#include "patterns/nm_mask.h"
#include "scratch.h"

namespace nb = nanobind;
using namespace twofour;

namespace {

constexpr NmMaskKernel kNmMaskKernels[] = {
#define TWOFOUR_NM_MASK(symbol, isa, n, m) {#symbol, isa, n, m, symbol},
#include "patterns/nm_mask.inc"
#undef TWOFOUR_NM_MASK
};

constexpr NmCompressKernel kNmCompressKernels[] = {
#define TWOFOUR_NM_COMPRESS(symbol, isa) {#symbol, isa, symbol},
#include "kernels/nm_compress/nm_compress.inc"
#undef TWOFOUR_NM_COMPRESS
};

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <class Row, size_t kCount>
const Row& row(const Row (&rows)[kCount], int index) {
  if (index < 0 || index >= static_cast<int>(kCount)) throw nb::index_error("no such kernel row");
  return rows[index];
}

void bind_masks(nb::module_& m) {
  m.def("nm_mask_rows", [] {
    nb::list rows;
    for (const auto& k : kNmMaskKernels) rows.append(nb::make_tuple(k.name, k.isa, k.n, k.m));
    return rows;
  });
  m.def("nm_mask", [](int index, uintptr_t scores, uintptr_t keep, int64_t groups, int n, int group, bool absolute,
                      int threads) {
    const NmMaskKernel& kernel = row(kNmMaskKernels, index);
    if (group < 1 || group > kNmMaskMaxGroup || n < 1 || n > group) throw nb::value_error("no such N:M");
    if (kernel.m != 0 && (kernel.n != n || kernel.m != group)) throw nb::value_error("the row is of another N:M");
    bool finite = true;
    nb::gil_scoped_release release;
    // 1024 groups a share: below that, starting a thread costs more than the mask.
    parallel_for(groups, 1024, threads, [&](int64_t begin, int64_t end) {
      const NmMask part{pointer<const float>(scores) + begin * group, pointer<uint8_t>(keep) + begin * group,
                        end - begin, n, group, absolute};
      if (!kernel.run(part)) __atomic_store_n(&finite, false, __ATOMIC_RELAXED);
    });
    return finite;
  });
}

void bind_compress(nb::module_& m) {
  m.def("nm_compress_rows", [] {
    nb::list rows;
    for (const auto& k : kNmCompressKernels) rows.append(nb::make_tuple(k.name, k.isa));
    return rows;
  });
  m.def("nm_compress", [](int index, uintptr_t weight, int64_t stride, int64_t rows, int64_t columns, uintptr_t values,
                          uintptr_t indices, int threads) {
    const NmCompressKernel& kernel = row(kNmCompressKernels, index);
    nb::gil_scoped_release release;
    return kernel.run({pointer<const float>(weight), stride, rows, columns, pointer<float>(values),
                       pointer<uint8_t>(indices), threads});
  });
}

// The header that stands in front of a layout: `_STRUCT` of packing/header.py, little-endian.
struct LayoutHeader {
  char magic[4];
  uint16_t version, reserved;
  char pattern[12], dtype[12], layout[16];
  int64_t rows, columns;
};
static_assert(sizeof(LayoutHeader) == 64);

bool made_for(const LayoutHeader& head, const char* layout, int64_t rows, int64_t columns) {
  return std::memcmp(head.magic, "24PK", 4) == 0 && head.version == 1 &&
         std::strncmp(head.layout, layout, sizeof head.layout) == 0 && head.rows == rows && head.columns == columns;
}

Layout layout_called(const std::string& name) {
  Layout layout;
  if (!layout_from_name(name.c_str(), &layout)) throw nb::value_error("no such layout");
  return layout;
}

void bind_layouts(nb::module_& m) {
  m.def("layout_bytes", [](const std::string& layout, int64_t rows, int64_t columns) {
    return layout_bytes(layout_called(layout), rows, columns);
  });
  m.def("layout_pack", [](const std::string& layout, uintptr_t values, uintptr_t indices, int64_t rows, int64_t columns,
                          uintptr_t packed) {
    const Layout kind = layout_called(layout);
    nb::gil_scoped_release release;
    layout_pack(kind, pointer<const float>(values), pointer<const uint8_t>(indices), rows, columns,
                pointer<void>(packed));
  });
  m.def("layout_unpack", [](const std::string& layout, uintptr_t packed, int64_t rows, int64_t columns,
                            uintptr_t values, uintptr_t indices) {
    const Layout kind = layout_called(layout);
    nb::gil_scoped_release release;
    layout_unpack(kind, pointer<const void>(packed), rows, columns, pointer<float>(values), pointer<uint8_t>(indices));
  });
  m.def("advise_huge_pages", [](uintptr_t address, size_t bytes) { advise_huge_pages(pointer<void>(address), bytes); });
}

void bind_matmul(nb::module_& m) {
  m.def("nm_matmul_rows", [] {
    nb::list rows;
    for (int i = 0; i < kNmMatmulKernelCount; ++i) {
      const NmMatmulKernel& k = kNmMatmulKernels[i];
      rows.append(nb::make_tuple(k.name, k.isa, k.layout, k.tokens_min, k.tokens_max));
    }
    return rows;
  });
  // Returns false, without touching y, when `weight` was made for another layout or shape.
  m.def("nm_matmul", [](int index, uintptr_t x, int64_t x_stride, uintptr_t weight, uintptr_t bias, uintptr_t y,
                        int64_t tokens, int64_t out_features, int64_t in_features, int threads) {
    static Scratch scratch;
    if (index < 0 || index >= kNmMatmulKernelCount) throw nb::index_error("no such kernel row");
    const NmMatmulKernel& kernel = kNmMatmulKernels[index];
    const auto* head = pointer<const LayoutHeader>(weight);
    if (!made_for(*head, kernel.layout, out_features, in_features)) return false;
    nb::gil_scoped_release release;
    NmMatmul args{pointer<const float>(x), x_stride,    head + 1, pointer<const float>(bias), pointer<float>(y),
                  out_features,            tokens,      out_features, in_features, threads, nullptr};
    const Scratch::Lease lease(scratch, static_cast<size_t>(kernel.workspace_bytes(args)));
    args.workspace = lease.data();
    kernel.run(args);
    return true;
  });
}

}  // namespace

NB_MODULE(_ext, m) {
  m.def("detect_isa", [] { return std::string(detect_isa()); });
  m.def("threads_backend", [] { return std::string(threads_backend()); });
  bind_masks(m);
  bind_compress(m);
  bind_layouts(m);
  bind_matmul(m);
}
