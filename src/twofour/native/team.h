// A team of threads on the OpenMP runtime that torch has loaded, or one thread where the compiler has none. Internal
// linkage: every instruction-set object carries its own copy.
//
// The thread sanitizer cannot look into libgomp and takes what its barriers order for races: under it the team is of the
// standard library's threads and barrier, and kernels share work and meet as they do elsewhere.
#pragma once

#include <cstdint>

#ifdef __SANITIZE_THREAD__
#include <barrier>
#include <thread>
#include <vector>
#elif defined(_OPENMP)
#include <omp.h>
#endif

namespace {

struct Team {
  int64_t me, size;
#ifdef __SANITIZE_THREAD__
  std::barrier<>* meeting = nullptr;
#endif

  void barrier() const {
    if (size <= 1) return;
#ifdef __SANITIZE_THREAD__
    meeting->arrive_and_wait();
#elif defined(_OPENMP)
#pragma omp barrier
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

// The runtime may grant fewer threads than asked for (limits, nesting), so the body is told the real size. The body must
// not throw: an exception that leaves a thread of the team ends the process.
template <class Body>
inline void with_team(int threads, const Body& body) {
#ifdef __SANITIZE_THREAD__
  std::barrier<> meeting(threads > 1 ? threads : 1);
  std::vector<std::thread> others;
  for (int me = 1; me < threads; ++me) others.emplace_back([&, me] { body(Team{me, threads, &meeting}); });
  body(Team{0, threads > 1 ? threads : 1, &meeting});
  for (std::thread& other : others) other.join();
#else
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    body(Team{omp_get_thread_num(), omp_get_num_threads()});
    return;
  }
#endif
  (void)threads;
  body(Team{0, 1});
#endif
}

}  // namespace
