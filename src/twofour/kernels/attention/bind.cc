// Attention for Python: the rows, and the call through raw pointers.
#include <nanobind/stl/array.h>

#include <array>
#include <cstring>

#include "attention.h"
#include "native/binding.h"
#include "native/parallel.h"
#include "native/scratch.h"

namespace nb = nanobind;

namespace twofour {
namespace {

constexpr AttentionKernel kKernels[] = {
#define TWOFOUR_ATTENTION(symbol, isa, dtype) {#symbol, isa, dtype, symbol##__workspace, symbol},
#include "attention.inc"
#undef TWOFOUR_ATTENTION
};

// Whether a mask of bytes hides nothing: models pass one for every batch, and most batches are not padded. Stops at the
// first key that is hidden.
bool keeps_all(const Attention& a) {
  const Strides& strides = a.mask_strides;
  const auto* mask = static_cast<const unsigned char*>(a.mask);
  for (int64_t b = 0; b < (strides.batch ? a.batch : 1); ++b)
    for (int64_t h = 0; h < (strides.head ? a.heads : 1); ++h)
      for (int64_t row = 0; row < (strides.row ? a.queries : 1); ++row)
        if (std::memchr(mask + strides.at(b, h) + row * strides.row, 0, static_cast<size_t>(a.keys))) return false;
  return true;
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("attention_rows", [] {
    nb::list rows;
    for (const auto& k : kKernels) rows.append(nb::make_tuple(k.name, k.isa, k.dtype));
    return rows;
  });
  // `at`: addresses of q, k, v, out, mask, and of the keys and values behind k's and v's (0: there are none); `strides`:
  // batch, head and row of each; `sizes`: batch, heads, key_heads, queries, keys, width, value_width, keys in k.
  m.def("attention", [](int index, std::array<uintptr_t, 7> at, std::array<int64_t, 21> strides,
                        std::array<int64_t, 8> sizes, int mask_kind, float scale, bool causal, int threads) {
    static Scratch scratch;
    const AttentionKernel& kernel = row(kKernels, index);
    if (mask_kind < 0 || mask_kind > 2) throw nb::value_error("no such kind of mask");
    const auto stride = [&](int i) { return Strides{strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]}; };
    Attention args{pointer<const void>(at[0]), pointer<const void>(at[1]), pointer<const void>(at[2]),
                   pointer<void>(at[3]), stride(0), stride(1), stride(2), stride(3),
                         pointer<const void>(at[4]), static_cast<AttentionMask>(mask_kind), stride(4), sizes[0],
                         sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], scale, causal,
                   pointer<const void>(at[5]), pointer<const void>(at[6]), stride(5), stride(6), sizes[7]};
    nb::gil_scoped_release release;
    if (args.mask_kind == AttentionMask::keep && keeps_all(args)) args.mask_kind = AttentionMask::none;
    parallel_for(args.batch * args.heads, 1, threads, [&](int64_t begin, int64_t end) {
      const Scratch::Lease lease(scratch, static_cast<size_t>(kernel.workspace_bytes(args)));
      kernel.run(args, begin, end, lease.data());
    });
  });
}

}  // namespace twofour
