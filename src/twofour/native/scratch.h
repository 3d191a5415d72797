// Scratch memory for kernels: kept between calls, never shared by two calls at once, so that kernels are re-entrant.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif
#ifdef _WIN32
#include <malloc.h>
#endif

namespace twofour {

constexpr size_t kHugePage = size_t{2} << 20;

// Asks for 2 MB pages inside [address, address + bytes): a packed weight of many pages otherwise misses the TLB. With
// `now`, for what has its pages already: they are copied to large ones where the kernel can (Linux 6.1).
inline void advise_huge_pages(void* address, size_t bytes, bool now = false) {
#ifdef __linux__
#ifndef MADV_COLLAPSE
  constexpr int MADV_COLLAPSE = 25;
#endif
  const size_t begin = (reinterpret_cast<size_t>(address) + kHugePage - 1) / kHugePage * kHugePage;
  const size_t end = (reinterpret_cast<size_t>(address) + bytes) / kHugePage * kHugePage;
  if (begin >= end) return;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  if (now) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_COLLAPSE);
#else
  (void)address, (void)bytes, (void)now;
#endif
}

// `bytes`, a multiple of `alignment`; null where there is no memory.
inline void* allocate_aligned(size_t alignment, size_t bytes) {
#ifdef _WIN32
  return _aligned_malloc(bytes, alignment);
#else
  return std::aligned_alloc(alignment, bytes);
#endif
}
inline void free_aligned(void* data) {
#ifdef _WIN32
  _aligned_free(data);
#else
  std::free(data);
#endif
}

// Memory that a call wants and nobody has: Python gets a MemoryError that says how much. 0 bytes: more than a number holds.
class NoWorkspace : public std::bad_alloc {
 public:
  explicit NoWorkspace(size_t bytes)
      : said_("no memory for the workspace of this call: " +
              (bytes == 0 ? "more bytes than a number holds" : std::to_string(bytes) + " bytes")) {}
  const char* what() const noexcept override { return said_.c_str(); }

 private:
  std::string said_;
};

// `each` bytes for every one of `members`.
inline size_t workspace_of(int64_t each, int64_t members) {
  int64_t all;
  if (each < 0 || __builtin_mul_overflow(each, members, &all)) throw NoWorkspace(0);
  return static_cast<size_t>(all);
}

// A stack of free buffers. The most recently returned one is the warmest and is tried first.
class Scratch {
 public:
  class Lease {
   public:
    Lease(Scratch& owner, size_t bytes) : owner_(owner), buffer_(owner.take(bytes)) {}
    ~Lease() { owner_.give(buffer_); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    void* data() const { return buffer_.first; }

   private:
    Scratch& owner_;
    std::pair<void*, size_t> buffer_;
  };

  Scratch() : next_(newest().load()) {
    while (!newest().compare_exchange_weak(next_, this)) {
    }
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Frees the buffers of all that no call has now, and returns their bytes: compile measures at more tokens than are
  // served, and what that took would stay for the process. The next call takes what it needs.
  static size_t release_all() {
    size_t freed = 0;
    for (Scratch* one = newest(); one; one = one->next_) freed += one->release();
    return freed;
  }

 private:
  // All of the library, the newest first. They are static: none ever goes.
  static std::atomic<Scratch*>& newest() {
    static std::atomic<Scratch*> first{nullptr};
    return first;
  }

  size_t release() {
    std::vector<std::pair<void*, size_t>> gone;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      gone.swap(free_);
    }
    size_t freed = 0;
    for (const auto& [data, bytes] : gone) free_aligned(data), freed += bytes;
    return freed;
  }

  std::pair<void*, size_t> take(size_t bytes) {
    if (bytes == 0) return {nullptr, 0};
    if (bytes > static_cast<size_t>(PTRDIFF_MAX) - kHugePage) throw NoWorkspace(0);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = free_.size(); i-- > 0;)
        if (free_[i].second >= bytes) {
          auto found = free_[i];
          free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
          return found;
        }
      if (!free_.empty()) {  // all too small: replace one rather than hoard
        free_aligned(free_.back().first);
        free_.pop_back();
      }
    }
    const size_t page = bytes >= kHugePage ? kHugePage : size_t{4096};
    const size_t rounded = (bytes + page - 1) / page * page;
    void* data = allocate_aligned(page, rounded);
    if (!data) throw NoWorkspace(rounded);
    advise_huge_pages(data, rounded);
    return {data, rounded};
  }

  void give(std::pair<void*, size_t> buffer) {
    if (!buffer.first) return;
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(buffer);
  }

  Scratch* next_;
  std::mutex mutex_;
  // Never destroyed: a thread may be at work while the process ends.
  std::vector<std::pair<void*, size_t>>& free_ = *new std::vector<std::pair<void*, size_t>>;
};

}  // namespace twofour
