// The row, once for every instruction set.
#include "activation.h"
#include "kernels/derivative.h"
#include "native/simd.h"

namespace {

using twofour::Activation;
using twofour::ActivationCall;

// Rows of activation(x) z.
template <Activation kind, class T>
void gate(const ActivationCall& a) {
  using V = Lanes;
  for (int64_t row = a.begin; row < a.end; ++row) {
    const T *x = static_cast<const T*>(a.x) + row * a.stride, *z = static_cast<const T*>(a.gated) + row * a.stride;
    T* answer = static_cast<T*>(a.answer) + row * a.width;
    for (int64_t i = 0; i < a.width; i += V::width) {
      const int64_t left = a.width - i;
      V::store(answer + i, activated<kind, V>(V::load(x + i, left)) * V::load(z + i, left), left);
    }
  }
}

template <Activation kind, class T>
void compute(const ActivationCall& a) {
  using V = Lanes;
  if (a.gated != nullptr) return gate<kind, T>(a);
  const T* x = static_cast<const T*>(a.x);
  T* answer = static_cast<T*>(a.answer);
  if (a.upstream != nullptr) {
    through_activation<kind, V>(static_cast<const T*>(a.upstream) + a.begin, x + a.begin, answer + a.begin, a.end - a.begin);
    return;
  }
  int64_t i = a.begin;
  for (; i + V::width <= a.end; i += V::width) V::store_unaligned(answer + i, activated<kind, V>(V::load_unaligned(x + i)));
  if (i < a.end) V::store_partial(answer + i, activated<kind, V>(V::load_partial(x + i, a.end - i)), a.end - i);
}

}  // namespace

namespace twofour {

void TWOFOUR_HERE(activation)(const ActivationCall& a) {
  with_activation(a.activation, [&](auto constant) {
    constexpr auto kind = decltype(constant)::value;
    if constexpr (kind != Activation::none) {
      if (a.bf16) compute<kind, uint16_t>(a);
      else compute<kind, float>(a);
    }
  });
}

}  // namespace twofour
