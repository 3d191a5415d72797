// A team of threads on the process's OpenMP runtime, or one thread where the compiler has none. Internal linkage:
// every instruction-set object carries its own copy.
#pragma once

#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

struct Team {
  int64_t me, size;

  void barrier() const {
#ifdef _OPENMP
    if (size > 1) {
#pragma omp barrier
    }
#endif
  }
  // This member's share of `count` items as [begin, end), in whole multiples of `grain` except the last.
  void share(int64_t count, int64_t grain, int64_t* begin, int64_t* end) const {
    const int64_t pieces = (count + grain - 1) / grain;
    *begin = pieces * me / size * grain;
    const int64_t stop = pieces * (me + 1) / size * grain;
    *end = stop < count ? stop : count;
  }
};

// The runtime may grant fewer threads than asked for (limits, nesting), so the body is told the real size.
template <class Body>
inline void with_team(int threads, const Body& body) {
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    body(Team{omp_get_thread_num(), omp_get_num_threads()});
    return;
  }
#endif
  (void)threads;
  body(Team{0, 1});
}

}  // namespace
