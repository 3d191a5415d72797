// Files whose bytes are memory of this process, under a lease of the system (Linux, F_SETLEASE): who opens such a file
// to write to it, or cuts it, waits until its pages were copied into memory of the process's own, and goes on then.
// Without it the process that looks at a page that was cut off would end (SIGBUS).
//
// The system tells of a writer by a signal. Its handler does all that there is to do: system calls and memcpy alone, no
// lock, no allocation; any thread may be the one that runs it, while others compute with the pages.
#include <atomic>

#include "binding.h"

#ifdef __linux__
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#endif

namespace twofour {
namespace {

#ifdef __linux__
enum State { kFree, kClaimed, kMapped, kOwn };  // a place of the table; kOwn: its pages are the process's own by now

struct Part {
  std::atomic<int> state;
  int file;
  char* begin;
  size_t bytes;
};

constexpr int kMost = 1 << 14;
Part parts[kMost];
std::atomic<int> places;   // of the table that were ever taken
std::atomic<int> running;  // threads that look at the table

bool leaving(int file) { return fcntl(file, F_GETLEASE) != F_RDLCK; }

// Puts memory with the same bytes in the place of a part, in one step for all other threads.
bool own(const Part& part) {
  void* const copy = mmap(nullptr, part.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) return false;
  std::memcpy(copy, part.begin, part.bytes);
  if (mremap(copy, part.bytes, part.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, part.begin) != MAP_FAILED) return true;
  munmap(copy, part.bytes);
  return false;
}

// Owns the parts of files that somebody wants to write to, or of all, and lets go of the leases that guard nothing more.
// A part that there is no memory for stays, and its file's lease: the writer waits for as long as the system lets it.
void own_parts(bool all) {
  const int error = errno;
  running++;
  const int count = places;
  for (int i = 0; i < count; i++)
    if (parts[i].state == kMapped && (all || leaving(parts[i].file)) && own(parts[i])) {
      int mapped = kMapped;  // it may have been given up meanwhile
      parts[i].state.compare_exchange_strong(mapped, kOwn);
    }
  for (int i = 0; i < count; i++) {
    bool guards = parts[i].state != kOwn;
    for (int j = 0; j < count && !guards; j++) guards = parts[j].state == kMapped && parts[j].file == parts[i].file;
    if (!guards) fcntl(parts[i].file, F_SETLEASE, F_UNLCK);
  }
  running--;
  errno = error;
}

void told(int) { own_parts(false); }

// The signal that writers are told by: one that nobody in this process has a use for. 0 where there is none.
int taken_signal() {
  for (int number = SIGRTMAX - 1; number > SIGRTMIN; number--) {
    struct sigaction now {};
    if (sigaction(number, nullptr, &now) || (now.sa_flags & SA_SIGINFO) || now.sa_handler != SIG_DFL) continue;
    struct sigaction ours {};
    ours.sa_handler = told;
    ours.sa_flags = SA_RESTART;
    sigfillset(&ours.sa_mask);
    if (!sigaction(number, &ours, nullptr)) return number;
  }
  return 0;
}

int lease_file(int file) {
  static const int number = taken_signal();
  if (!number) return EBUSY;
  const bool held = !fcntl(file, F_SETSIG, number) && !fcntl(file, F_SETOWN, getpid()) && !fcntl(file, F_SETLEASE, F_RDLCK);
  return held ? 0 : errno;
}

int guard_pages(const Operand& pages, int file) {
  const View view = Border("guard_pages").dense(pages, "pages", {Type::u8});
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), begin = reinterpret_cast<uintptr_t>(view.data);
  const uintptr_t first = begin / page * page, last = (begin + static_cast<size_t>(view.count()) + page - 1) / page * page;
  for (int i = 0; i < kMost; i++) {
    int free = kFree;
    if (!parts[i].state.compare_exchange_strong(free, kClaimed)) continue;
    parts[i].file = file, parts[i].begin = reinterpret_cast<char*>(first), parts[i].bytes = last - first;
    for (int most = places; most <= i && !places.compare_exchange_weak(most, i + 1);) {
    }
    parts[i].state = kMapped;
    if (leaving(file)) own_parts(false);  // a writer came before the part was in the table
    return i;
  }
  return -1;
}

void leave_pages(int place) {
  if (place < 0 || place >= places) return;
  parts[place].state = kFree;
  while (running) sched_yield();  // a handler may be copying them
}

void own_pages() { own_parts(true); }
#else
int lease_file(int) { return ENOSYS; }
int guard_pages(const Operand&, int) { return -1; }
void leave_pages(int) {}
void own_pages() {}
#endif

}  // namespace

void bind_mapped(nb::module_& m) {
  // File numbers of `twofour/native/mapped.py`; 0, or the system's reason why there is no lease.
  m.def("lease_file", [](int file) { return lease_file(file); });
  m.def("guard_pages", [](const Operand& pages, int file) { return guard_pages(pages, file); });
  m.def("leave_pages", [](int place) { leave_pages(place); });
  m.def("own_pages", [] { own_pages(); });
}

}  // namespace twofour
