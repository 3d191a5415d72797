// Activations as 16-bit fixed point, for integer multiplication: x = scale * q with one scale a token, q in
// -32639..32639, cut into two planes of bytes, q = 256 * high + low. And sums on their way out. V: whole_lanes.h; internal
// linkage.
//
// The rounding error of a token is at most max |x| / 65278 a value: forty times below that of bfloat16 for values that
// are spread like a normal distribution.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/real_vectors.h"
#include "kernels/whole_lanes.h"
#include "native/compiler.h"

namespace {

constexpr float kSignedLargest = 127 * 256 + 127;  // of two signed bytes

// A vector of values of token `t` from input k on, zero past the end.
template <class V>
TWOFOUR_INLINE typename V::reg load_x(const Matmul& a, int64_t t, int64_t k) {
  const int64_t left = a.in_features - k;
  return load_numbers<V>(element(a.x, a.x_type, t * a.x_stride + k), a.x_type, left > 0 ? left : 0);
}

// The scale of a token: NaN if a value is NaN or infinite, so that all its outputs become NaN; 1 for a row of zeros.
template <class V>
inline float scale_of(const Matmul& a, int64_t t, float largest) {
  typename V::I most{};  // of the bits: NaN and infinity compare above every finite number
  for (int64_t k = 0; k < a.in_features; k += V::width) {
    const auto size = (typename V::I)V::magnitude(load_x<V>(a, t, k));
    most = size > most ? size : most;
  }
  int32_t bits = 0;
  for (int i = 0; i < V::width; i++) bits = most[i] > bits ? most[i] : bits;
  if (bits >= 0x7f800000) return __builtin_nanf("");
  const float scale = __builtin_bit_cast(float, bits) / largest;
  return scale >= 1.2e-38f ? scale : 1.0f;  // below, 1 / scale overflows: such a token counts as zero
}

template <class V>
TWOFOUR_INLINE typename V::ints round_x(const Matmul& a, int64_t t, int64_t k, typename V::reg inverse) {
  return V::to_ints(load_x<V>(a, t, k) * inverse);
}

// Bias and epilogue of a vector of outputs of one token, stored as y's type.
template <class V>
TWOFOUR_INLINE void finish(const Matmul& a, int64_t t, int64_t row, typename V::reg y) {
  const int64_t count = least(a.out_features - row, V::width);
  store_outputs<V>(a, t, row, count, y + bias_of<V>(a, row, count));
}

// A vector of bfloat16 scales as floats.
template <class V>
TWOFOUR_INLINE typename V::reg load_scales(const uint8_t* from) {
  return V::load_unaligned(reinterpret_cast<const uint16_t*>(from));
}

// The zero points of `load_zeros` as floats.
template <class V>
TWOFOUR_INLINE typename V::reg zero_floats(typename V::ints zeros) {
  return V::to_real((typename V::ints)((typename V::U)zeros & 15));
}

// A vector of zero points, each in the four bytes of its row's lane.
template <class V>
TWOFOUR_INLINE typename V::ints load_zeros(const uint8_t* from) {
  typedef uint8_t Bytes __attribute__((vector_size(V::width)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  auto zeros = __builtin_convertvector(bytes, typename V::U);
  zeros |= zeros << 8;
  return (typename V::ints)(zeros | zeros << 16);
}

}  // namespace
