// Threads for kernels: torch's own OpenMP pool where the compiler's runtime is the one torch loaded, else one thread.
//
// The objects are compiled with -fopenmp and linked without it: the undefined GOMP_* symbols bind to the libgomp that
// `import torch` has loaded, so that one runtime lives in the process (a second one halves the speed).
#pragma once

#include <cstdint>

#include "native/team.h"

namespace twofour {

inline const char* threads_backend() {
#ifdef _OPENMP
  return "openmp";
#else
  return "single";
#endif
}

// Calls body(begin, end) on contiguous shares of [0, count), each share a multiple of `grain` except the last.
// The body must not throw, as that of a team.
template <class Body>
static inline void parallel_for(int64_t count, int64_t grain, int threads, const Body& body) {
  if (threads > 1 && count > grain) {
    with_team(threads, [&](const Team& team) {
      int64_t begin, end;
      team.share(count, grain, &begin, &end);
      if (begin < end) body(begin, end);
    });
  } else if (count > 0) {
    body(int64_t{0}, count);
  }
}

}  // namespace twofour
