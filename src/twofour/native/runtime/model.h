// A loaded file that is run: which program serves which inputs, and the memory of its runs.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <vector>

#include "native/team.h"
#include "program_file.h"

namespace twofour {

// Inputs or outputs that no program takes or gives.
struct Unfit : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A tensor of a caller's, without gaps.
struct GivenTensor {
  const char* name;
  int type, axes;
  const int64_t* shape;  // null, of an output alone: the program's
  char* data;
  uint64_t bytes;
};

class Model {
 public:
  Model(ProgramFile file, int threads, GivenThreads given) : file_(std::move(file)), threads_(threads), given_(given) {}

  const std::vector<Program>& programs() const { return file_.programs; }

  // Throws Unfit, a Refusal of a call, or bad_alloc. Several threads may call it.
  void run(std::span<const GivenTensor> inputs, std::span<const GivenTensor> outputs);

 private:
  using Arena = std::unique_ptr<char, void (*)(void*)>;

  Arena arena_of(const Program& program);
  void keep(size_t program, Arena arena) noexcept;
  void run_calls(const Program& program, const std::vector<char*>& buffers) const;

  ProgramFile file_;
  int threads_;
  GivenThreads given_;
  std::mutex mutex_;
  std::vector<std::vector<Arena>> idle_{file_.programs.size()};  // of each program
};

}  // namespace twofour
