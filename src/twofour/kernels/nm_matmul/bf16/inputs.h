// Where inputs of a token stand: in x, or in `more` from `split` on. Internal linkage.
#pragma once

#include "kernels/real_vectors.h"

namespace {

struct InputsAt {
  const char* x;
  int64_t step;  // bytes from a token to the next
};

// Input k of a token, and those behind it up to the next multiple of 32, which both parts are cut at.
TWOFOUR_INLINE InputsAt inputs_at(const Matmul& a, Type type, int64_t token, int64_t k) {
  const int64_t size = type == Type::f32 ? 4 : 2;
  if (a.more == nullptr || k < a.split) return {element(a.x, type, token * a.x_stride + k), a.x_stride * size};
  return {element(a.more, type, token * a.more_stride + (k - a.split)), a.more_stride * size};
}

}  // namespace
