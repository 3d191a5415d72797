// Files whose bytes are memory of this process, under a lease of the system (Linux, F_SETLEASE): who opens such a file
// to write to it, or cuts it, waits until its pages were copied into memory of the process's own, and goes on then.
// Without it the process that looks at a page that was cut off would end (SIGBUS).
//
// The system tells of a writer by SIGIO: where there is no room to queue a real-time signal, that comes in its place.
// Its handler does all that there is to do: system calls and memcpy alone, no lock, no allocation; any thread may be
// the one that runs it, while others read the pages. Tensors on them are for reading.
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
// A place of the table. kComing: its file keeps the lease, nobody looks at its pages; kOwning: one thread makes them the
// process's own; kOwn: they are.
enum State { kFree, kClaimed, kComing, kMapped, kOwning, kOwn };

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

// Puts memory with the same bytes in the place of a part, in one step for all other threads;
// what one of them writes between the copy and that step is lost.
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
    if (int mapped = kMapped; parts[i].state == kMapped && (all || leaving(parts[i].file)) &&
                              parts[i].state.compare_exchange_strong(mapped, kOwning)) {
      const int found = own(parts[i]) ? kOwn : kMapped;
      int owning = kOwning;  // it may have been given up meanwhile
      parts[i].state.compare_exchange_strong(owning, found);
    }
  for (int i = 0; i < count; i++) {
    bool guards = parts[i].state != kOwn;
    for (int j = 0; j < count && !guards; j++) {
      const int state = parts[j].state;
      guards = (state == kComing || state == kMapped || state == kOwning) && parts[j].file == parts[i].file;
    }
    if (!guards) fcntl(parts[i].file, F_SETLEASE, F_UNLCK);
  }
  running--;
  errno = error;
}

void told(int) { own_parts(false); }

// Takes the signal where nobody has a use for it, and where it would come: 0, or why it is not ours.
int take_signal() {
  struct sigaction now {}, ours {};
  sigset_t blocked;
  // Of the calling thread on Linux, as pthread_sigmask, which older systems have elsewhere.
  if (sigprocmask(SIG_BLOCK, nullptr, &blocked) || sigismember(&blocked, SIGIO)) return ECANCELED;
  if (sigaction(SIGIO, nullptr, &now)) return errno;
  if (!(now.sa_flags & SA_SIGINFO) && now.sa_handler == told) return 0;
  if ((now.sa_flags & SA_SIGINFO) || now.sa_handler != SIG_DFL) return EBUSY;
  ours.sa_handler = told;
  ours.sa_flags = SA_RESTART;
  sigfillset(&ours.sa_mask);
  return sigaction(SIGIO, &ours, nullptr) ? errno : 0;
}

int lease_file(int file) {
  if (const int reason = take_signal()) return reason;
  const bool held = !fcntl(file, F_SETSIG, 0) && !fcntl(file, F_SETOWN, getpid()) && !fcntl(file, F_SETLEASE, F_RDLCK);
  return held ? 0 : errno;
}

void leave_pages(int place) {
  if (place < 0 || place >= places) return;
  parts[place].state = kClaimed;
  while (running) sched_yield();  // a handler may be copying them
  parts[place].state = kFree;
}

// The whole pages of a part, back to the system, which reads them from its file again: nobody has written to them.
void forget_pages(const Operand& pages) {
  const View view = Border("forget_pages").dense(pages, "pages", {Type::u8});
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), begin = reinterpret_cast<uintptr_t>(view.data);
  const uintptr_t first = (begin + page - 1) / page * page, last = (begin + static_cast<size_t>(view.count())) / page * page;
  for (int i = 0; i < places && first < last; i++) {
    int mapped = kMapped;
    if (parts[i].begin != reinterpret_cast<char*>(begin / page * page)) continue;
    if (!parts[i].state.compare_exchange_strong(mapped, kComing)) continue;  // they may be no file's any more
    madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
    parts[i].state = kMapped;
    if (leaving(parts[i].file)) own_parts(false);  // a writer came meanwhile
  }
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
    parts[i].state = kComing;
    while (running) sched_yield();  // who looks at the table later keeps the lease
    const bool late = leaving(file);  // it may be gone, and the pages with it: nobody looks at them
    if (!late) parts[i].state = kMapped;
    if (late) leave_pages(i);
    if (leaving(file)) own_parts(false);  // a writer came meanwhile
    return late ? -1 : i;
  }
  return -1;
}

void own_pages() {
  own_parts(true);
  for (int i = 0; i < places; i++)
    while (parts[i].state == kOwning) sched_yield();  // another thread's handler copies it
}
#else
int lease_file(int) { return ENOSYS; }
int guard_pages(const Operand&, int) { return -1; }
void leave_pages(int) {}
void forget_pages(const Operand&) {}
void own_pages() {}
#endif

}  // namespace

void bind_mapped(nb::module_& m) {
  // File numbers of `twofour/native/mapped.py`; 0, or the system's reason why there is no lease.
  m.def("lease_file", [](int file) { return lease_file(file); });
  m.def("guard_pages", [](const Operand& pages, int file) { return guard_pages(pages, file); });
  m.def("leave_pages", [](int place) { leave_pages(place); });
  m.def("forget_pages", [](const Operand& pages) { forget_pages(pages); });
  m.def("own_pages", [] { own_pages(); });
}

}  // namespace twofour
