// What a kernel says of a weight whose bytes no packing writes: any member of a team may say so, so that the flag is atomic.
#pragma once

namespace {

inline void report(bool* damaged) { __atomic_store_n(damaged, true, __ATOMIC_RELAXED); }

}  // namespace
