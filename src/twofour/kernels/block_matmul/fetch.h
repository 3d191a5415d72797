// A token's inputs beside a vector of weights: each of `width / S` steps repeated for the S rows of a strip.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "native/compiler.h"
#include "native/simd.h"

namespace {

// Lane l of the answer is dword l / S from p on. No more dwords are loaded than are used: loads of whole vectors cross the
// ends of cache lines, and beside the loads of weights they took 20 to 30 % longer (Zen 4, strips of 8 rows). By the
// instructions' names where there are such: of shuffles between vectors of two lengths gcc 12 makes stores and loads.
template <class V, int S, int... lane>
TWOFOUR_INLINE typename V::reg spread(const char* p, std::integer_sequence<int, lane...>) {
  [[maybe_unused]] constexpr int steps = V::width / S;
  [[maybe_unused]] typedef int Places __attribute__((vector_size(4 * V::width)));
#if defined(TWOFOUR_SET_avx2)
  static_assert(V::width == 16 || V::width == 8);
  const Places places = {(lane / S)...};
  const auto* from = reinterpret_cast<const float*>(p);
  __m128 few;
  if constexpr (steps == 2) few = _mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  else few = _mm_loadu_ps(from);
#if defined(TWOFOUR_SET_avx512)
  __m512 all;
  if constexpr (steps == 8) all = _mm512_castps256_ps512(_mm256_loadu_ps(from));
  else all = _mm512_castps128_ps512(few);
  return (typename V::reg)_mm512_permutexvar_ps((__m512i)places, all);
#else
  return (typename V::reg)_mm256_permutevar8x32_ps(_mm256_castps128_ps256(few), (__m256i)places);
#endif
#else
  const auto all = V::load_unaligned(reinterpret_cast<const float*>(p));
  return __builtin_shufflevector(all, all, (lane / S)...);
#endif
}
template <class V, int S>
TWOFOUR_INLINE typename V::reg spread(const char* p) {
  if constexpr (S >= V::width) return V::broadcast(reinterpret_cast<const float*>(p));
  else if constexpr (S == 1) return V::load_unaligned(reinterpret_cast<const float*>(p));
  else return spread<V, S>(p, std::make_integer_sequence<int, V::width>{});
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

// The same where a dword is of two inputs that stand apart: element e of step k at at(2 k + e).
template <class V, int S, class At>
TWOFOUR_INLINE typename V::reg gather_pairs(const At& at) {
  constexpr int steps = V::width > S ? V::width / S : 1;
#if defined(TWOFOUR_SET_avx512)
  __m512i v = _mm512_setzero_si512();
  TWOFOUR_UNROLL
  for (int i = 0; i < steps * 2; i++) {
    const int lanes = S < V::width ? S : V::width, step = i / 2, element = i % 2;
    const uint64_t all = (uint64_t{1} << 2 * lanes) - 1;
    const auto mask = static_cast<__mmask32>((all & (0x55555555u << element)) << (2 * lanes * step));
    asm("vpbroadcastw %1, %0%{%2%}" : "+v"(v) : "m"(*reinterpret_cast<const uint16_t*>(at(i))), "Yk"(mask));
  }
  return (typename V::reg)v;
#else
  char dwords[4 * steps];
  TWOFOUR_UNROLL
  for (int i = 0; i < steps * 2; i++) std::memcpy(dwords + i * 2, at(i), 2);
  typename V::reg v = V::zero();
  gather<V, S, 0>(v, [&](int step) { return dwords + 4 * step; });
  return v;
#endif
}

}  // namespace
