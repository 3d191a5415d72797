// A call of attention by a team: heads are shared among its members, each with a workspace of its own.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "attention.h"
#include "native/integers.h"
#include "native/parallel.h"
#include "native/scratch.h"
#include "native/unlocked.h"

namespace twofour {

// Whether a mask of bytes hides nothing: models pass one for every batch, and most batches are not padded. Stops at the
// first key that is hidden.
inline bool keeps_all(const Attention& a) {
  const Strides& strides = a.mask_strides;
  const auto* mask = static_cast<const unsigned char*>(a.mask);
  for (int64_t b = 0; b < (strides.batch ? a.mask_batch() : 1); ++b)
    for (int64_t h = 0; h < (strides.head ? a.heads : 1); ++h)
      for (int64_t row = 0; row < (strides.row ? a.queries : 1); ++row)
        if (std::memchr(mask + a.mask_at(b, h, row), 0, static_cast<size_t>(a.keys))) return false;
  return true;
}

inline void run_attention(const AttentionKernel& kernel, Attention args, int threads) {
  static Scratch scratch;
  if (args.batch == 0 || args.queries == 0 || args.value_width == 0) return;  // a broadcast mask may have no memory here
  const Unlocked unlocked;
  if (args.keys == 0) args.mask_kind = AttentionMask::none, args.unseen = 0;  // a sum of nothing, not of hidden keys
  if (args.mask_kind == AttentionMask::keep && keeps_all(args)) args.mask_kind = AttentionMask::none;
  const int64_t count = args.batch * args.heads, members = std::max<int64_t>(1, std::min<int64_t>(count, threads));
  const int64_t each = round_up(kernel.workspace_bytes(args), 64);
  const Scratch::Lease lease(scratch, workspace_of(each, members));  // here: a thread of the team cannot say that there is no memory
  std::atomic<int64_t> next{0};
  parallel_for(count, 1, threads, [&](int64_t begin, int64_t end) {
    kernel.run(args, begin, end, static_cast<char*>(lease.data()) + each * next.fetch_add(1));
  });
}

}  // namespace twofour
