// Threads of our own, for a process whose torch has none that serve: kept between calls, never shared by two at once.
#pragma once

#ifndef _WIN32
#include <pthread.h>
#endif

#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "native/barrier.h"
#include "native/team.h"

namespace twofour {

// A caller and the threads that wait for its next body. They never end: a call may come at any time.
class ThreadPool {
 public:
  explicit ThreadPool(int threads) : asked(threads) {
    int64_t started = 1;
    try {
      for (; started < threads; ++started)
        std::thread([this, me = started] {
          size_.wait(0);  // until it is known how many there are
          for (;;) work(me);
        }).detach();
    } catch (const std::system_error&) {  // no more are granted
    }
    all_.expect(started);
    size_ = started;
    size_.notify_all();
  }

  void run(Member* member, const void* body) {
    member_ = member, body_ = body;
    work(0);
  }

  const int asked;

 private:
  void work(int64_t me) {
    all_.wait();
    member_(body_, me, size_.load(std::memory_order_relaxed), &all_);
    all_.wait();
  }

  std::atomic<int64_t> size_{0};
  Barrier all_{1};
  Member* member_ = nullptr;
  const void* body_ = nullptr;
};

// The pools that wait for a caller.
class ThreadPools {
 public:
  ThreadPool* take(int threads) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = idle_.size(); i-- > 0;)
      if (ThreadPool* found = idle_[i]; found->asked == threads) {
        idle_.erase(idle_.begin() + static_cast<std::ptrdiff_t>(i));
        return found;
      }
    return new ThreadPool(threads);
  }

  void give(ThreadPool* pool) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(pool);
  }

  // A forked child has none of its parent's threads, so it starts with no pools.
  static ThreadPools& here() {
    static ThreadPools* pools = new ThreadPools;
#ifndef _WIN32
    static const int watching = pthread_atfork(nullptr, nullptr, [] { pools = new ThreadPools; });
    static_cast<void>(watching);
#endif
    return *pools;
  }

 private:
  std::mutex mutex_;
  std::vector<ThreadPool*> idle_;
};

inline void run_pool(int threads, Member* member, const void* body) {
  ThreadPools& pools = ThreadPools::here();
  ThreadPool* pool = pools.take(threads);
  pool->run(member, body);
  pools.give(pool);
}

}  // namespace twofour
