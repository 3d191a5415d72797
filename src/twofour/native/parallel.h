// Threads for kernels: torch's own OpenMP pool where the compiler's runtime is the one torch loaded, else one thread.
//
// The objects are compiled with -fopenmp and linked without it: the undefined GOMP_* symbols bind to the libgomp that
// `import torch` has loaded, so that one runtime lives in the process (a second one halves the speed, DESIGN.md 5).
#pragma once

#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace twofour {

inline const char* threads_backend() {
#ifdef _OPENMP
  return "openmp";
#else
  return "single";
#endif
}

// Calls body(begin, end) on contiguous shares of [0, count), each share a multiple of `grain` except the last.
// The body must not throw: an exception that leaves a thread of the team ends the process.
template <class Body>
static inline void parallel_for(int64_t count, int64_t grain, int threads, const Body& body) {
#ifdef _OPENMP
  if (threads > 1 && count > grain) {
#pragma omp parallel num_threads(threads)
    {
      const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
      const int64_t blocks = (count + grain - 1) / grain;
      const int64_t begin = blocks * me / team * grain, stop = blocks * (me + 1) / team * grain;
      const int64_t end = stop < count ? stop : count;
      if (begin < end) body(begin, end);
    }
    return;
  }
#else
  (void)grain, (void)threads;
#endif
  if (count > 0) body(int64_t{0}, count);
}

}  // namespace twofour
