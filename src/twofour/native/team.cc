// Where the threads of a team come from: the OpenMP runtime that torch has loaded, torch's own loop, a pool of ours, or the
// caller of a library without Python.
//
// The functions of the first two are looked up in the process and never linked: whatever the compiler, no runtime but
// torch's is there (a second one halves the speed), and libtorch is no library of the extension.
#include "native/team.h"

#include <atomic>
#include <cstring>

#include "native/barrier.h"
#include "native/loaded.h"
#include "native/thread_pool.h"

namespace twofour {
namespace {

// The thread sanitizer cannot look into torch's threads and takes what their barriers order for races.
#if defined(__SANITIZE_THREAD__)
constexpr bool kOwnAlone = true;
#elif defined(__has_feature)
constexpr bool kOwnAlone = __has_feature(thread_sanitizer);
#else
constexpr bool kOwnAlone = false;
#endif

// What GCC makes of `omp parallel`, `omp barrier` and the two questions; LLVM's and Intel's runtimes have them as well.
struct {
  void (*parallel)(void (*each)(void*), void* data, unsigned threads, unsigned flags);
  void (*barrier)();
  int (*thread_num)();
  int (*num_threads)();
} openmp;

// One of the C functions that torch keeps stable.
int32_t (*torch_loop)(int64_t begin, int64_t end, int64_t grain, void (*each)(int64_t, int64_t, void*), void* data);

void run_openmp(int threads, Member* member, const void* body) {
  struct Call {
    Member* member;
    const void* body;
  } call{member, body};
  const auto each = [](void* data) {
    const Call& given = *static_cast<Call*>(data);
    given.member(given.body, openmp.thread_num(), openmp.num_threads(), nullptr);
  };
  openmp.parallel(each, &call, static_cast<unsigned>(threads), 0);
}

// Each thread that torch grants takes a range of [0, threads): one place, or several where fewer are granted, as inside
// another of its loops. When all places have come the team is complete, and its size is the number of ranges.
void run_torch(int threads, Member* member, const void* body) {
  struct Call {
    Member* member;
    const void* body;
    int64_t threads;
    Barrier meeting;
    std::atomic<int64_t> ranges{0};
  } call{member, body, threads, Barrier(threads)};
  const auto each = [](int64_t begin, int64_t end, void* data) {
    Call& given = *static_cast<Call*>(data);
    const int64_t place = given.ranges.fetch_add(1);
    given.meeting.wait(end - begin);
    const int64_t size = given.ranges.load();
    given.meeting.expect(size);
    given.member(given.body, size == given.threads ? begin : place, size, &given.meeting);
  };
  // Refused before it began: this thread is the team.
  if (torch_loop(0, threads, 1, each, &call) != 0 && call.ranges.load() == 0) member(body, 0, 1, nullptr);
}

// Of whoever calls: its function runs all places at once.
thread_local const GivenThreads* given = nullptr;

void run_given(int threads, Member* member, const void* body) {
  struct Call {
    Member* member;
    const void* body;
    int64_t threads;
    Barrier meeting;
  } call{member, body, threads, Barrier(threads)};
  given->run(given->pool, threads, [](void* data, int64_t place) {
    Call& all = *static_cast<Call*>(data);
    all.member(all.body, place, all.threads, &all.meeting);
  }, &call);
}

struct Source {
  const char* name;
  void (*run)(int threads, Member* member, const void* body);
};
constexpr Source kOpenMp{"openmp", run_openmp}, kTorch{"torch", run_torch}, kOwn{"own", run_pool};
std::atomic<const Source*> chosen{&kOwn};

template <class Function>
bool find(const char* library, const char* name, Function** function) {
  *function = reinterpret_cast<Function*>(loaded_function(name, library));
  return *function;
}

bool find_openmp(const char* library) {
  return find(library, "GOMP_parallel", &openmp.parallel) && find(library, "GOMP_barrier", &openmp.barrier) &&
         find(library, "omp_get_thread_num", &openmp.thread_num) &&
         find(library, "omp_get_num_threads", &openmp.num_threads);
}

}  // namespace

bool use_threads(const char* source, const char* library) {
  const Source* wanted = nullptr;
  if (!std::strcmp(source, "own")) wanted = &kOwn;
  if (!kOwnAlone && !std::strcmp(source, "openmp") && find_openmp(library)) wanted = &kOpenMp;
  if (!kOwnAlone && !std::strcmp(source, "torch") && find(library, "torch_parallel_for", &torch_loop)) wanted = &kTorch;
  if (wanted) chosen = wanted;
  return wanted;
}

const char* threads_backend() { return chosen.load()->name; }

GivenThreads::Use::Use(const GivenThreads* threads) : before_(given) { given = threads; }
GivenThreads::Use::~Use() { given = before_; }

void run_team(int threads, Member* member, const void* body) {
  given ? run_given(threads, member, body) : chosen.load()->run(threads, member, body);
}

void wait_for_team(Barrier* meeting) { meeting ? meeting->wait() : openmp.barrier(); }

}  // namespace twofour
