// A value that several hold and nobody changes. As std::shared_ptr, whose count asks glibc 2.32 whether there are threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

namespace twofour {

template <class T>
class Shared {
 public:
  template <class... Given>
  static Shared make(Given&&... given) {
    Shared made;
    made.held_ = new Held{T(std::forward<Given>(given)...)};
    return made;
  }
  Shared() = default;
  Shared(const Shared& other) : held_(other.held_) {
    if (held_) held_->owners.fetch_add(1, std::memory_order_relaxed);
  }
  Shared(Shared&& other) noexcept : held_(std::exchange(other.held_, nullptr)) {}
  Shared& operator=(Shared other) noexcept { return std::swap(held_, other.held_), *this; }
  ~Shared() {
    if (held_ && held_->owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete held_;
  }
  const T& operator*() const { return held_->value; }
  const T* operator->() const { return &held_->value; }

 private:
  struct Held {
    T value;
    std::atomic<int64_t> owners{1};
  };
  Held* held_ = nullptr;
};

}  // namespace twofour
