// A file of programs as it stands in memory, every number of it held against what is there: docs/runtime.md has the format.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "native/geometry.h"
#include "native/recording.h"

namespace twofour {

// A file of a version that is not read here.
struct OtherVersion : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A tensor inside one of a program's buffers.
struct Placed {
  uint32_t buffer;
  int64_t offset;  // bytes
  Geometry geometry;
};

// What a program takes or gives; without gaps as the caller has it. Of an output `where` says where the program leaves it.
struct NamedTensor {
  std::string name;
  Type type;
  std::vector<int64_t> shape;
  int64_t bytes;
  int32_t where = -1;  // a place
};

struct ProgramCall {
  RecordedCall call;
  std::vector<int32_t> operands;  // places, -1 for None
};

// Calls for one set of input shapes. Buffers: 0 the arena, then the inputs, then the file's constants.
struct Program {
  std::vector<NamedTensor> inputs, outputs;
  int64_t arena;  // bytes
  std::vector<Placed> places;
  std::vector<ProgramCall> calls;
};

struct Constant {
  char* data;
  int64_t bytes;
};

// Memory at a multiple of 64 bytes, of large pages where it is large, not written yet; throws bad_alloc.
using AlignedMemory = std::unique_ptr<char, void (*)(void*)>;
AlignedMemory aligned_memory(uint64_t size);

// Programs and their constants, which lie in `memory`.
struct ProgramFile {
  AlignedMemory memory;
  std::vector<Constant> constants;
  std::vector<Program> programs;

  // Reads `size` bytes at a multiple of 64. Throws Malformed, OtherVersion, or a Refusal of what this build or CPU lacks.
  ProgramFile(AlignedMemory memory, uint64_t size);
};

}  // namespace twofour
