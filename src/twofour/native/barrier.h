// Where the threads of a team wait for each other, as often as they like.
#pragma once

#include <atomic>
#include <cstdint>

namespace twofour {

class Barrier {
 public:
  // It is held when `places` of them have come.
  explicit Barrier(int64_t places) : wanted_(places) {}

  // Another number from the next meeting on; whoever says so comes to it afterwards.
  void expect(int64_t places) { wanted_.store(places, std::memory_order_relaxed); }

  // Waits for the others, on behalf of several places of one thread. It spins before it sleeps: to be woken by the system
  // costs more than most waits. The places wanted are read before this thread's own are seen, as they may then change.
  void wait(int64_t places = 1) {
    const uint32_t held = held_.load(std::memory_order_acquire);
    const int64_t wanted = wanted_.load(std::memory_order_relaxed);
    if (here_.fetch_add(places, std::memory_order_acq_rel) + places == wanted) {
      here_.store(0, std::memory_order_relaxed);
      held_.fetch_add(1, std::memory_order_release);
      held_.notify_all();
      return;
    }
    for (int spin = 0; spin < kSpins; ++spin) {
      if (held_.load(std::memory_order_acquire) != held) return;
      pause();
    }
    held_.wait(held, std::memory_order_acquire);
  }

 private:
  static constexpr int kSpins = 4000;  // some 0.1 ms

  static void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  std::atomic<int64_t> wanted_, here_{0};
  std::atomic<uint32_t> held_{0};
};

}  // namespace twofour
