// Attention for Python: the rows, and the call through raw pointers.
#include <nanobind/stl/array.h>

#include <array>

#include "attention.h"
#include "native/binding.h"
#include "native/parallel.h"
#include "native/scratch.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr AttentionKernel kKernels[] = {
#define TWOFOUR_ATTENTION(symbol, isa) {#symbol, isa, symbol##__workspace, symbol},
#include "attention.inc"
#undef TWOFOUR_ATTENTION
};

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("attention_rows", [] {
    nb::list rows;
    for (const auto& k : kKernels) rows.append(nb::make_tuple(k.name, k.isa));
    return rows;
  });
  // `at`: addresses of q, k, v, out and mask; `strides`: batch, head and row of each; `sizes`: batch, heads, key_heads,
  // queries, keys, width, value_width.
  m.def("attention", [](int index, std::array<uintptr_t, 5> at, std::array<int64_t, 15> strides,
                        std::array<int64_t, 7> sizes, int mask_kind, float scale, bool causal, int threads) {
    static Scratch scratch;
    const AttentionKernel& kernel = row(kKernels, index);
    if (mask_kind < 0 || mask_kind > 2) throw nb::value_error("no such kind of mask");
    const auto stride = [&](int i) { return Strides{strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]}; };
    const Attention args{pointer<const float>(at[0]), pointer<const float>(at[1]), pointer<const float>(at[2]),
                         pointer<float>(at[3]), stride(0), stride(1), stride(2), stride(3),
                         pointer<const void>(at[4]), static_cast<AttentionMask>(mask_kind), stride(4), sizes[0],
                         sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], scale, causal};
    nb::gil_scoped_release release;
    parallel_for(args.batch * args.heads, 1, threads, [&](int64_t begin, int64_t end) {
      const Scratch::Lease lease(scratch, static_cast<size_t>(kernel.workspace_bytes(args)));
      kernel.run(args, begin, end, lease.data());
    });
  });
}

}  // namespace twofour
