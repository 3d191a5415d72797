// How a tensor lies in memory, without its address: what recorded programs say of their operands.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "operand.h"

namespace twofour {

struct Geometry {
  Type type;
  int64_t width;  // bytes of a number
  std::vector<int64_t> shape, strides;  // in numbers

  Geometry(Type type, int64_t width, std::vector<int64_t> shape, std::vector<int64_t> strides)
      : type(type), width(width), shape(std::move(shape)), strides(std::move(strides)) {
    if (this->shape.size() != this->strides.size() || width < 1) throw std::invalid_argument("no such tensor");
  }
  View at(char* data) const {
    return {data, type, width, static_cast<int>(shape.size()), shape.data(), strides.data()};
  }
  // Bytes from the first number to the end of the last one; throws where they, or the numbers, are more than 2^62.
  int64_t reach() const {
    constexpr int64_t most = int64_t{1} << 62;
    int64_t last = 0, count = 1, step;
    for (size_t i = 0; i < shape.size(); i++)
      if (strides[i] < 0 || shape[i] < 0) throw std::invalid_argument("no such tensor");
    for (const int64_t size : shape)
      if (size == 0) return 0;
    for (size_t i = 0; i < shape.size(); i++)
      if (__builtin_mul_overflow(count, shape[i], &count) || count > most ||
          __builtin_mul_overflow(shape[i] - 1, strides[i], &step) || __builtin_add_overflow(last, step, &last))
        throw std::invalid_argument("no such tensor");
    if (last > most / width) throw std::invalid_argument("no such tensor");
    return (last + 1) * width;
  }
  bool is(const View& view) const {
    if (view.type != type || view.width != width || view.ndim != static_cast<int>(shape.size())) return false;
    for (size_t i = 0; i < shape.size(); i++)
      if (view.shape[i] != shape[i] || (shape[i] > 1 && view.strides[i] != strides[i])) return false;
    return true;
  }
};

}  // namespace twofour
