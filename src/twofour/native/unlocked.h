// What a kernel's run does with Python's lock: lets go of it, where there is a Python.
#pragma once

namespace twofour {

// The extension sets both when it is imported; a program without Python leaves them.
struct PythonLock {
  void* (*release)() = nullptr;
  void (*acquire)(void* state) = nullptr;
};
inline PythonLock python_lock;

// While one is there, other threads of Python run.
class Unlocked {
 public:
  Unlocked() : state_(python_lock.release ? python_lock.release() : nullptr) {}
  ~Unlocked() {
    if (python_lock.acquire) python_lock.acquire(state_);
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  void* state_;
};

}  // namespace twofour
