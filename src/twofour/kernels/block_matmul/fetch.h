// A token's inputs beside a vector of weights: each of `width / S` steps repeated for the S rows of a strip.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "native/compiler.h"
#include "native/simd.h"

namespace {

// Lane l of the answer is lane l / S of v.
template <class V, int S, int... lane>
TWOFOUR_INLINE typename V::reg spread(typename V::reg v, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(v, v, (lane / S)...);
}
template <class V, int S>
TWOFOUR_INLINE typename V::reg spread(typename V::reg v) {
  if constexpr (S == 1) return v;
  return spread<V, S>(v, std::make_integer_sequence<int, V::width>{});
}

// Pieces of `piece` lanes of a, then b: those of even, or odd, number.
template <class V, int piece, int odd, int... lane>
TWOFOUR_INLINE typename V::reg every_other(typename V::reg a, typename V::reg b, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b, (lane / piece * 2 * piece + odd * piece + lane % piece)...);
}

// Lanes [first, first + count) of `to` become the dword at p.
template <class V, int first, int count>
TWOFOUR_INLINE void put(typename V::reg& to, const char* p) {
#if defined(TWOFOUR_SET_avx512)
  constexpr auto mask = static_cast<__mmask16>(((1u << count) - 1) << first);
  asm("vbroadcastss %1, %0%{%2%}" : "+v"(to) : "m"(*reinterpret_cast<const float*>(p)), "Yk"(mask));
#else
  float value;
  std::memcpy(&value, p, 4);
  TWOFOUR_UNROLL
  for (int l = first; l < first + count; l++) to[l] = value;
#endif
}

// The dword of every step from `at(step)`; steps [step, width / S).
template <class V, int S, int step, class At>
TWOFOUR_INLINE void gather(typename V::reg& to, const At& at) {
  if constexpr (step == 0) to = V::broadcast(reinterpret_cast<const float*>(at(0)));
  else put<V, step * S, S>(to, at(step));
  if constexpr ((step + 1) * S < V::width) gather<V, S, step + 1>(to, at);
}

// The same where a dword is of `per` inputs that stand apart: element e of step k at at(k * per + e).
template <class V, int S, int per, class At>
TWOFOUR_INLINE typename V::reg gather_elements(const At& at) {
  constexpr int steps = V::width > S ? V::width / S : 1;
#if defined(TWOFOUR_SET_avx512)
  __m512i v = _mm512_setzero_si512();
  TWOFOUR_UNROLL
  for (int i = 0; i < steps * per; i++) {
    const int lanes = S < V::width ? S : V::width, step = i / per, element = i % per;
    if constexpr (per == 2) {
      const uint64_t all = (uint64_t{1} << 2 * lanes) - 1;
      const auto mask = static_cast<__mmask32>((all & (0x55555555u << element)) << (2 * lanes * step));
      asm("vpbroadcastw %1, %0%{%2%}" : "+v"(v) : "m"(*reinterpret_cast<const uint16_t*>(at(i))), "Yk"(mask));
    } else {
      const uint64_t all = lanes == 16 ? ~uint64_t{0} : (uint64_t{1} << (4 * lanes % 64)) - 1;
      const auto mask = static_cast<__mmask64>((all & (0x1111111111111111u << element)) << (4 * lanes * step));
      asm("vpbroadcastb %1, %0%{%2%}" : "+v"(v) : "m"(*reinterpret_cast<const uint8_t*>(at(i))), "Yk"(mask));
    }
  }
  return (typename V::reg)v;
#else
  char dwords[4 * steps];
  TWOFOUR_UNROLL
  for (int i = 0; i < steps * per; i++) std::memcpy(dwords + i * (4 / per), at(i), 4 / per);
  typename V::reg v = V::zero();
  gather<V, S, 0>(v, [&](int step) { return dwords + 4 * step; });
  return v;
#endif
}

}  // namespace
