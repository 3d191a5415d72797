// What happens to a sum before it is stored: y = activation(sum + bias), then y + other or y * other.
#pragma once

#include <cstdint>

namespace twofour {

enum class Activation : int { none, relu, gelu, gelu_tanh, silu };  // gelu: the erf form
enum class Combine : int { none, add, multiply };

// `other` has y's shape and element type; its stride is in elements. The order of both lists is that of epilogue.py.
struct Epilogue {
  Activation activation;
  Combine combine;
  const void* other;
  int64_t other_stride;

  bool plain() const { return activation == Activation::none && combine == Combine::none; }
};

}  // namespace twofour
