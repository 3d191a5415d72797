// The rows of hybrid.inc: the inputs of the dense groups are copied once more, then a row of nm_matmul multiplies.
#include "hybrid.h"

#include <cstring>

#include "kernels/layouts/regions.h"
#include "kernels/nm_matmul/nm_matmul.h"
#include "native/parallel.h"

namespace twofour {
namespace {

constexpr int64_t kTokens = 4;  // that a thread's share is a multiple of

// A row of nm_matmul. Its vectors read so many inputs of a token together, so that those of `more` may stand elsewhere from any
// multiple on; 0: it reads x alone.
struct Inner {
  int64_t (*workspace_bytes)(const Matmul&);
  void (*run)(const Matmul&);
  int64_t together;
};

int64_t bytes_of(Type type) { return type == Type::f32 ? 4 : type == Type::bf16 ? 2 : 1; }

// A call on inputs that are widened by those of the dense groups. Behind x stand the latter alone where the row reads `more` and
// x ends between two of its vectors; else all inputs are copied, those of the dense groups behind the others.
struct Widening {
  const Matmul& args;
  const Regions regions;
  int64_t dense, size, first, width;

  Widening(const Matmul& a, int64_t together) : args(a), regions{static_cast<const char*>(a.weight)}, size(bytes_of(a.x_type)) {
    // Without a weight as many as there may be, so that its workspace is large enough for any.
    dense = a.weight == nullptr ? a.in_features / kGroup : regions.dense();
    first = together > 0 && a.in_features % together == 0 ? 0 : a.in_features;  // inputs that are copied before the others
    width = first + kGroup * dense;
  }
  int64_t bytes() const { return round_up(args.tokens * width * size, 64); }

  // The product of 2:4 that it comes down to; what is copied stands at the start of the workspace.
  Matmul call() const {
    Matmul found = args;
    found.in_features = args.in_features + kGroup * dense;
    if (first > 0) found.x = args.workspace, found.x_stride = width;
    else if (dense > 0) found.more = args.workspace, found.split = args.in_features, found.more_stride = width;
    if (args.weight != nullptr) found.weight = regions.weight();
    if (args.workspace != nullptr) found.workspace = static_cast<char*>(args.workspace) + bytes();
    return found;
  }
  // Of `Size` bytes a number.
  template <int64_t Size>
  void copy() const {
    const int32_t* groups = regions.groups();
    parallel_for(args.tokens, kTokens, args.threads, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        const char* from = static_cast<const char*>(args.x) + t * args.x_stride * Size;
        char* to = static_cast<char*>(args.workspace) + t * width * Size;
        if (first > 0) std::memcpy(to, from, static_cast<size_t>(first * Size));
        for (int64_t g = 0; g < dense; g++)
          std::memcpy(to + (first + g * kGroup) * Size, from + groups[g] * kGroup * Size, kGroup * Size);
      }
    });
  }
};

int64_t widened_workspace(const Matmul& args, const Inner& inner) {
  const Widening wide(args, inner.together);
  return wide.bytes() + inner.workspace_bytes(wide.call());
}

void run_widened(const Matmul& args, const Inner& inner) {
  const Widening wide(args, inner.together);
  if (!wide.regions.sound(args.in_features)) {
    *args.damaged = true;
    return;
  }
  if (wide.size == 4) wide.copy<4>();
  else if (wide.size == 2) wide.copy<2>();
  else wide.copy<1>();
  inner.run(wide.call());
}

}  // namespace

#define TWOFOUR_HYBRID(row, together)                                                                                   \
  int64_t hybrid_matmul_##row##__workspace(const Matmul& args) {                                                        \
    return widened_workspace(args, {nm_matmul_2x4_##row##__workspace, nm_matmul_2x4_##row, together});                  \
  }                                                                                                                     \
  void hybrid_matmul_##row(const Matmul& args) {                                                                        \
    run_widened(args, {nm_matmul_2x4_##row##__workspace, nm_matmul_2x4_##row, together});                               \
  }

TWOFOUR_HYBRID(f32_panels__scalar, 16)
TWOFOUR_HYBRID(f32_pairs__scalar, 16)
TWOFOUR_HYBRID(f32_rows__scalar, 16)
TWOFOUR_HYBRID(int8_rows__scalar, 16)
TWOFOUR_HYBRID(bf16_panels__scalar, 32)
TWOFOUR_HYBRID(bf16_rows__scalar, 32)
#ifdef TWOFOUR_X86
TWOFOUR_HYBRID(f32_panels__avx2, 16)
TWOFOUR_HYBRID(f32_panels_blocked__avx2, 16)
TWOFOUR_HYBRID(f32_panels_few__avx2, 16)
TWOFOUR_HYBRID(f32_pairs__avx2, 16)
TWOFOUR_HYBRID(f32_pairs_blocked__avx2, 16)
TWOFOUR_HYBRID(f32_rows__avx2, 16)
TWOFOUR_HYBRID(f32_rows_stream__avx2, 16)
TWOFOUR_HYBRID(f32_panels__avx512, 16)
TWOFOUR_HYBRID(f32_panels_blocked__avx512, 16)
TWOFOUR_HYBRID(f32_panels_narrow__avx512, 16)
TWOFOUR_HYBRID(f32_panels_few__avx512, 16)
TWOFOUR_HYBRID(f32_pairs__avx512, 16)
TWOFOUR_HYBRID(f32_pairs_blocked__avx512, 16)
TWOFOUR_HYBRID(f32_pairs_narrow__avx512, 16)
TWOFOUR_HYBRID(f32_rows__avx512, 16)
TWOFOUR_HYBRID(f32_rows_near__avx512, 16)
TWOFOUR_HYBRID(f32_rows_stream__avx512, 16)
TWOFOUR_HYBRID(f32_rows_spread__avx512, 16)
TWOFOUR_HYBRID(bf16_panels__avx2, 32)
TWOFOUR_HYBRID(bf16_rows__avx2, 32)
TWOFOUR_HYBRID(bf16_rows_stream__avx2, 32)
TWOFOUR_HYBRID(bf16_panels__avx512_bf16, 32)
TWOFOUR_HYBRID(bf16_rows__avx512_bf16, 32)
TWOFOUR_HYBRID(bf16_rows_near__avx512_bf16, 32)
TWOFOUR_HYBRID(bf16_rows_stream__avx512_bf16, 32)
TWOFOUR_HYBRID(bf16_panels__avx512, 32)
TWOFOUR_HYBRID(bf16_rows__avx512, 32)
TWOFOUR_HYBRID(bf16_rows_stream__avx512, 32)
TWOFOUR_HYBRID(int8_rows__avx2, 16)
TWOFOUR_HYBRID(int8_rows_stream__avx2, 16)
TWOFOUR_HYBRID(int8_rows__avx_vnni, 16)
TWOFOUR_HYBRID(int8_rows_stream__avx_vnni, 16)
TWOFOUR_HYBRID(int8_rows__avx512_vnni, 16)
TWOFOUR_HYBRID(int8_rows_stream__avx512_vnni, 16)
TWOFOUR_HYBRID(bf16_tiles__amx, 0)
TWOFOUR_HYBRID(int8_tiles__amx, 0)
#endif
#ifdef TWOFOUR_ARM
TWOFOUR_HYBRID(f32_panels__neon, 16)
TWOFOUR_HYBRID(f32_pairs__neon, 16)
TWOFOUR_HYBRID(f32_rows__neon, 16)
TWOFOUR_HYBRID(bf16_panels__neon, 32)
TWOFOUR_HYBRID(bf16_rows__neon_bf16, 32)
TWOFOUR_HYBRID(bf16_rows__neon, 32)
TWOFOUR_HYBRID(int8_rows__neon_i8mm, 16)
TWOFOUR_HYBRID(int8_rows__neon_dotprod, 16)
#endif

#undef TWOFOUR_HYBRID

}  // namespace twofour
