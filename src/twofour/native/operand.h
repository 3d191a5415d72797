// The border between tensors and kernels: what a native call is handed is looked at here before a pointer is taken.
//
// Bound functions take tensors, not addresses; how a tensor of Python is read stands in tensors.cc. An executor, and a program
// without Python, hand descriptors of memory instead, which are looked at in the same way.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "type.h"
#include "unlocked.h"

namespace twofour {

// A refusal by the border; it leaves C++ as twofour.errors.KernelError with these four parts.
struct Refusal {
  std::string what, got, wanted, remedy;
};

struct View;

// An argument as Python passed it, a PyObject, or what an executor says of one; None is neither.
struct Operand {
  void* tensor = nullptr;
  const View* described = nullptr;
  bool given() const { return tensor || described; }
};

// One that the call writes.
struct Answer : Operand {};

// Several of them: a list of tensors.
template <class One>
struct ListOf : std::vector<One> {};
using Operands = ListOf<Operand>;
using Answers = ListOf<Answer>;

// Types that a call takes of one operand.
class Types {
 public:
  constexpr Types(std::initializer_list<Type> types) {
    for (const Type type : types) bits_ |= 1u << static_cast<int>(type);
  }
  constexpr bool has(Type type) const { return bits_ >> static_cast<int>(type) & 1; }
  std::string text() const;

 private:
  unsigned bits_ = 0;
};
constexpr Types kAnyType{Type::f32, Type::bf16, Type::u8, Type::s8, Type::boolean, Type::s64, Type::other};
constexpr Types kReal{Type::f32, Type::bf16};

// A tensor on the CPU with memory of its own. `shape` and `strides` (in numbers) stand in the tensor.
struct View {
  char* data;
  Type type;
  int64_t width;  // bytes of a number
  int ndim;
  const int64_t *shape, *strides;

  int64_t count() const;
  bool contiguous() const;
};

// What knows tensors of Python: the extension sets it when it is imported.
struct TensorReader {
  enum Found { memory, none, elsewhere };  // it stands on the CPU, it does not tell where it stands, it stands on a device
  Found (*read)(void* tensor, View* view) = nullptr;
  std::string (*describe)(void* tensor) = nullptr;
};
inline TensorReader tensor_reader;

// (..., width) as rows: numbers of a row stand together, rows `stride` apart.
struct Rows {
  char* data;
  Type type;
  int64_t rows, width, stride;
};

// `count` numbers in a row, copied where the tensor has them apart; null where none were given.
class Numbers {
 public:
  Numbers() = default;
  Numbers(const View& from, int64_t count);
  const float* data() const { return copy_.empty() ? data_ : copy_.data(); }

 private:
  const float* data_ = nullptr;
  std::vector<float> copy_;
};

// One native call, named for messages: every operand goes through one of its functions, which throw a Refusal.
class Border {
 public:
  explicit Border(const char* call) : call_(call) {}

  // Any strides.
  View strided(const Operand& operand, const char* role, Types types) const;
  // Without gaps, in the order of its shape.
  View dense(const Operand& operand, const char* role, Types types) const;
  // At least one axis, the last one contiguous, the others at one distance.
  Rows rows(const Operand& operand, const char* role, Types types) const;
  // float32 (count,) or None.
  Numbers numbers(const Operand& operand, const char* role, int64_t count) const;
  // dense, and `count` numbers of it.
  View exactly(const Operand& operand, const char* role, Types types, int64_t count) const;

  // Throws where `fits` is false. Of what is written out a call that fits makes no string.
  void require(bool fits, const Operand& operand, const char* role, const char* wanted) const {
    if (!fits) refuse(operand, role, wanted);
  }
  void require(bool fits, const Operand& operand, const char* role, const std::string& wanted) const {
    if (!fits) refuse(operand, role, wanted);
  }
  [[noreturn]] void refuse(const Operand& operand, const char* role, const std::string& wanted,
                           const std::string& remedy = "") const;
  // The bytes of a weight say what no packing writes.
  [[noreturn]] void damaged() const;

 private:
  const char* call_;
};

}  // namespace twofour
