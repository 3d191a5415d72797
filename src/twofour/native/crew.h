// Threads of our own, for a process whose torch has none that serve: kept between calls, never shared by two at once.
#pragma once

#include <pthread.h>

#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "native/meeting.h"
#include "native/team.h"

namespace twofour {

// A caller and the threads that wait for its next body. They never end: a call may come at any time.
class Crew {
 public:
  explicit Crew(int threads) : asked(threads), size_(threads), all_(threads) {
    try {
      for (int64_t me = 1; me < threads; ++me, ++started_)
        std::thread([this, me] {
          for (;;) work(me);
        }).detach();
    } catch (const std::system_error&) {  // no more are granted
      size_ = started_;
      all_.expect(size_);
    }
  }

  void run(Member* member, const void* body) {
    member_ = member, body_ = body;
    work(0);
  }

  const int asked;

 private:
  void work(int64_t me) {
    all_.wait();
    member_(body_, me, size_, &all_);
    all_.wait();
  }

  int64_t size_, started_ = 1;
  Meeting all_;
  Member* member_ = nullptr;
  const void* body_ = nullptr;
};

// The crews that wait for a caller.
class Crews {
 public:
  Crew* take(int threads) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = idle_.size(); i-- > 0;)
      if (Crew* found = idle_[i]; found->asked == threads) {
        idle_.erase(idle_.begin() + static_cast<std::ptrdiff_t>(i));
        return found;
      }
    return new Crew(threads);
  }

  void give(Crew* crew) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(crew);
  }

  // A forked child has none of its parent's threads, so it starts with no crews.
  static Crews& here() {
    static Crews* crews = new Crews;
    static const int watching = pthread_atfork(nullptr, nullptr, [] { crews = new Crews; });
    static_cast<void>(watching);
    return *crews;
  }

 private:
  std::mutex mutex_;
  std::vector<Crew*> idle_;
};

inline void run_crew(int threads, Member* member, const void* body) {
  Crews& crews = Crews::here();
  Crew* crew = crews.take(threads);
  crew->run(member, body);
  crews.give(crew);
}

}  // namespace twofour
