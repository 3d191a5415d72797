// A team of threads: members that run one body at once, share its work out and wait for each other. Which threads they
// are is chosen when the extension is imported (team.cc), so objects of every compiler use torch's. Internal linkage:
// every instruction-set object carries its own copy.
#pragma once

#include <cstdint>

namespace twofour {

class Barrier;
using Member = void(const void* body, int64_t me, int64_t size, Barrier* meeting);

// Runs `member` by `threads` threads at once, of which this one is the first, or by fewer where no more are granted.
void run_team(int threads, Member* member, const void* body);
void wait_for_team(Barrier* meeting);

// Takes the threads of the teams to come from `source`: "openmp", "torch" or "own". Functions of the first two are looked
// up in the process, then in `library`, torch's module of Python, and in what that was linked with. False, and no change,
// where they are not found.
bool use_threads(const char* source, const char* library);

// The source in use, "own" until another is chosen.
const char* threads_backend();

// Threads of a caller's own: `run` calls `each` for every place below `count`, all at once, each on a thread of its own (they
// wait for each other), and returns when all have ended. While a Use is there, teams that its thread starts are of these.
struct GivenThreads {
  void (*run)(void* pool, int64_t count, void (*each)(void* data, int64_t place), void* data);
  void* pool;

  class Use {
   public:
    explicit Use(const GivenThreads* threads);  // null: as without it
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    const GivenThreads* before_;
  };
};

}  // namespace twofour

namespace {

struct Team {
  int64_t me, size;
  twofour::Barrier* meeting = nullptr;

  void barrier() const {
    if (size > 1) twofour::wait_for_team(meeting);
  }
  // This member's share of `count` items as [begin, end), in whole multiples of `grain` except the last.
  void share(int64_t count, int64_t grain, int64_t* begin, int64_t* end) const {
    const int64_t pieces = (count + grain - 1) / grain;
    *begin = pieces * me / size * grain;
    const int64_t stop = pieces * (me + 1) / size * grain;
    *end = stop < count ? stop : count;
  }
};

// Fewer threads may be granted than asked for (limits, nesting), so the body is told the real size. The body must not
// throw: an exception that leaves a thread of the team ends the process.
template <class Body>
inline void with_team(int threads, const Body& body) {
  if (threads <= 1) {
    body(Team{0, 1});
    return;
  }
  const auto member = [](const void* given, int64_t me, int64_t size, twofour::Barrier* meeting) {
    (*static_cast<const Body*>(given))(Team{me, size, meeting});
  };
  twofour::run_team(threads, member, &body);
}

}  // namespace
