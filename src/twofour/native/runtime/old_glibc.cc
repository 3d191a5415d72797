// What a static libstdc++ of a newer system takes of its glibc, under the names and versions that glibc 2.28 has: linked on
// glibc 2.36, libtwofour runs on both. Hidden, so that nothing else in the process sees them; tests/test_linked.py
// holds the result. Compiled where glibc is new enough to need it.
#include <cstddef>
#include <cstdint>

#include <pthread.h>
#include <sys/random.h>

#if defined(__GLIBC__) && defined(__GLIBCXX__)
#if __GLIBC_PREREQ(2, 34)

#if defined(__x86_64__)
#define TWOFOUR_OLDEST "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define TWOFOUR_OLDEST "GLIBC_2.17"
#endif

#ifdef TWOFOUR_OLDEST
#define TWOFOUR_HIDDEN __attribute__((visibility("hidden")))
// Moved from libpthread to libc by glibc 2.34, which gave them a new version and kept the old one.
#define TWOFOUR_OLD(result, name, parameters, arguments)                \
  result twofour_old_##name parameters;                                 \
  __asm__(".symver twofour_old_" #name ", " #name "@" TWOFOUR_OLDEST);  \
  TWOFOUR_HIDDEN result name parameters { return twofour_old_##name arguments; }

extern "C" {
TWOFOUR_OLD(int, pthread_create, (pthread_t* thread, const pthread_attr_t* with, void* (*run)(void*), void* given) noexcept,
            (thread, with, run, given))
TWOFOUR_OLD(int, pthread_join, (pthread_t thread, void** result), (thread, result))
TWOFOUR_OLD(int, pthread_detach, (pthread_t thread) noexcept, (thread))
TWOFOUR_OLD(int, pthread_once, (pthread_once_t* once, void (*run)()), (once, run))
TWOFOUR_OLD(int, __pthread_key_create, (pthread_key_t* key, void (*end)(void*)) noexcept, (key, end))

// Since glibc 2.32 libstdc++ asks whether there is one thread alone, to spare atomic operations: "no" is always right.
TWOFOUR_HIDDEN char __libc_single_threaded = 0;

// Since glibc 2.36 std::random_device reads it. Nothing here does; it comes along with another function.
TWOFOUR_HIDDEN uint32_t arc4random() noexcept {
  uint32_t number = 0;
  while (getrandom(&number, sizeof number, 0) != static_cast<ssize_t>(sizeof number)) {
  }
  return number;
}
}
#endif
#endif
#endif
