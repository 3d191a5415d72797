// The rows of hybrid.inc: the inputs of the dense groups are copied once more, then a row of nm_matmul multiplies.
#include "hybrid.h"

#include <cstring>

#include "kernels/nm_matmul/nm_matmul.h"
#include "native/parallel.h"

namespace twofour {
namespace {

constexpr int64_t kTokens = 4;  // that a thread's share is a multiple of
constexpr int64_t kWhole = 16;  // inputs: rows whose number is a multiple are read where they stand

const int32_t* said(const Matmul& args) { return static_cast<const int32_t*>(args.weight); }

// Without a weight as many as there may be, so that its workspace is large enough for any.
int64_t dense_groups(const Matmul& args) { return args.weight == nullptr ? args.in_features / kGroup : said(args)[0]; }

// How x is read: its inputs where they stand, or copied too, where they are not whole vectors.
bool in_place(const Matmul& args) { return args.in_features % kWhole == 0; }

// Inputs of a token that are copied: those of the dense groups, behind all where those are copied too.
int64_t copied(const Matmul& args) { return kGroup * dense_groups(args) + (in_place(args) ? 0 : args.in_features); }

int64_t copied_bytes(const Matmul& args) { return round_up(args.tokens * copied(args) * 4, 64); }

// The product of 2:4 that it comes down to; what is copied stands at the start of the workspace.
Matmul widened(const Matmul& args) {
  const HybridPlaces places(dense_groups(args));
  Matmul found = args;
  found.in_features = args.in_features + kGroup * places.dense;
  if (in_place(args) && places.dense > 0)
    found.more = args.workspace, found.split = args.in_features, found.more_stride = copied(args);
  if (!in_place(args)) found.x = args.workspace, found.x_stride = copied(args);
  if (args.weight != nullptr) found.weight = static_cast<const char*>(args.weight) + places.weight;
  if (args.workspace != nullptr) found.workspace = static_cast<char*>(args.workspace) + copied_bytes(args);
  return found;
}

int64_t widened_workspace(const Matmul& args, int64_t (*inner)(const Matmul&)) {
  return copied_bytes(args) + inner(widened(args));
}

void copy_inputs(const Matmul& args) {
  const int32_t* groups = said(args) + 1;
  const int64_t dense = dense_groups(args), first = in_place(args) ? 0 : args.in_features;
  parallel_for(args.tokens, kTokens, args.threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const float* from = x_of(args) + t * args.x_stride;
      float* to = static_cast<float*>(args.workspace) + t * copied(args);
      if (first > 0) std::memcpy(to, from, static_cast<size_t>(first) * 4);
      for (int64_t g = 0; g < dense; g++) std::memcpy(to + first + g * kGroup, from + groups[g] * kGroup, kGroup * 4);
    }
  });
}

void run_widened(const Matmul& args, void (*inner)(const Matmul&)) {
  const int32_t* groups = said(args) + 1;
  for (int64_t g = 0; g < dense_groups(args); g++)
    if (groups[g] < 0 || groups[g] >= args.in_features / kGroup) {
      *args.damaged = true;
      return;
    }
  copy_inputs(args);
  inner(widened(args));
}

}  // namespace

#define TWOFOUR_HYBRID(row)                                                                                             \
  int64_t hybrid_matmul_##row##__workspace(const Matmul& args) {                                                        \
    return widened_workspace(args, nm_matmul_2x4_##row##__workspace);                                                   \
  }                                                                                                                     \
  void hybrid_matmul_##row(const Matmul& args) { run_widened(args, nm_matmul_2x4_##row); }

TWOFOUR_HYBRID(f32_panels__scalar)
TWOFOUR_HYBRID(f32_pairs__scalar)
TWOFOUR_HYBRID(f32_rows__scalar)
#ifdef TWOFOUR_X86
TWOFOUR_HYBRID(f32_panels__avx2)
TWOFOUR_HYBRID(f32_panels_blocked__avx2)
TWOFOUR_HYBRID(f32_pairs__avx2)
TWOFOUR_HYBRID(f32_pairs_blocked__avx2)
TWOFOUR_HYBRID(f32_rows__avx2)
TWOFOUR_HYBRID(f32_panels__avx512)
TWOFOUR_HYBRID(f32_panels_blocked__avx512)
TWOFOUR_HYBRID(f32_panels_narrow__avx512)
TWOFOUR_HYBRID(f32_pairs__avx512)
TWOFOUR_HYBRID(f32_pairs_blocked__avx512)
TWOFOUR_HYBRID(f32_rows__avx512)
TWOFOUR_HYBRID(f32_rows_near__avx512)
TWOFOUR_HYBRID(f32_rows_spread__avx512)
#endif
#ifdef TWOFOUR_ARM
TWOFOUR_HYBRID(f32_panels__neon)
TWOFOUR_HYBRID(f32_pairs__neon)
TWOFOUR_HYBRID(f32_rows__neon)
#endif

#undef TWOFOUR_HYBRID

}  // namespace twofour
