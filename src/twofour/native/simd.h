// The vocabulary of vectors: `Lanes`, the float32 vectors of the instruction set that a source is compiled for, with the
// same operations in all sets, so that a kernel is written once. +, -, * and comparisons are the compiler's own. What an
// instruction does better than the compiler's vectors is in lanes_*.h. Internal linkage, for kernel sources only.
#pragma once

#include <concepts>
#include <cstdint>

#include "compiler.h"

#if defined(TWOFOUR_SET_avx512)
#include "lanes_avx512.h"
#elif defined(TWOFOUR_SET_avx2)
#include "lanes_avx2.h"
#elif defined(TWOFOUR_SET_neon)
#include "lanes_neon.h"
#else
#include "lanes_portable.h"
#endif

namespace {

struct Lanes : SetLanes {
  using F = reg;
  typedef int32_t I __attribute__((vector_size(4 * width)));
  typedef uint32_t U __attribute__((vector_size(4 * width)));

  static TWOFOUR_INLINE U lanes() {
    U v{};
    TWOFOUR_UNROLL
    for (int i = 0; i < width; i++) v[i] = static_cast<uint32_t>(i);
    return v;
  }

  static TWOFOUR_INLINE reg magnitude(reg x) { return (reg)((I)x & INT32_MAX); }

  // bfloat16 is the upper half of a float. Stores round to nearest even; a NaN stays one.
  using SetLanes::store_partial;
  using SetLanes::store_unaligned;
  using SetLanes::stream;
  // What the upper halves of are floats rounded to bfloat16.
  static TWOFOUR_INLINE reg to_upper(reg x) {
    const U bits = (U)x, even = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
    return (reg)(x == x ? even : quiet);
  }
  static TWOFOUR_INLINE reg rounded(reg x) { return (reg)((U)to_upper(x) & 0xffff0000u); }
  static TWOFOUR_INLINE void store_unaligned(uint16_t* p, reg v) { store_upper(p, to_upper(v)); }
  static TWOFOUR_INLINE void stream(uint16_t* p, reg v) { stream_upper(p, to_upper(v)); }
  static TWOFOUR_INLINE void store_partial(uint16_t* p, reg v, int64_t count) {
    store_upper_partial(p, to_upper(v), count);
  }
  // The first `count` lanes, or all where `count` is more.
  template <class X>
  static TWOFOUR_INLINE reg load(const X* p, int64_t count) {
    return count >= width ? load_unaligned(p) : load_partial(p, count);
  }
  template <class Y>
  static TWOFOUR_INLINE void store(Y* p, reg v, int64_t count) {
    if (count >= width) store_unaligned(p, v);
    else store_partial(p, v, count);
  }
  // Dwords that hold two bfloat16 each, as two vectors of floats.
  static TWOFOUR_INLINE reg lower(ireg v) { return (reg)((U)v << 16); }
  static TWOFOUR_INLINE reg upper(ireg v) { return (reg)((U)v & 0xffff0000u); }
  static TWOFOUR_INLINE void broadcast_pair(const char* p, reg (&w)[2]) {
    const auto both = (ireg)broadcast(reinterpret_cast<const float*>(p));
    w[0] = lower(both);
    w[1] = upper(both);
  }
};

// What every set's vectors offer. `load_aligned`, `load_shared` and `store_aligned` may want the alignment of a vector;
// `..._partial` are of the first `count` lanes, 0 ... width; those behind are zero.
template <class V>
concept FloatLanes = requires(float* to, const float* from, uint16_t* to_half, const uint16_t* half, const char* bytes,
                              const uint8_t* many, int64_t count, float one, typename V::reg r, typename V::ireg i,
                              typename V::reg (&square)[V::width], typename V::reg (&four)[4]) {
  requires V::width > 0 && V::sums > 0;  // and how many registers may hold sums
  { V::zero() } -> std::same_as<typename V::reg>;
  { V::all(one) } -> std::same_as<typename V::reg>;
  { V::load_aligned(from) } -> std::same_as<typename V::reg>;
  { V::load_shared(from) } -> std::same_as<typename V::reg>;
  { V::load_unaligned(from) } -> std::same_as<typename V::reg>;
  { V::load_unaligned(half) } -> std::same_as<typename V::reg>;
  { V::load_partial(from, count) } -> std::same_as<typename V::reg>;
  { V::load_partial(half, count) } -> std::same_as<typename V::reg>;
  V::store_aligned(to, r);
  V::store_unaligned(to, r);
  V::store_unaligned(to_half, r);
  V::store_partial(to, r, count);
  V::store_partial(to_half, r, count);
  V::store_upper(to_half, r);
  V::stream(to, r);
  V::stream(to_half, r);
  V::order_streams();
  { V::broadcast(from) } -> std::same_as<typename V::reg>;
  { V::broadcast_shared(from) } -> std::same_as<typename V::reg>;
  { V::broadcast4(from) } -> std::same_as<typename V::reg>;
  { V::fma(r, from, r) } -> std::same_as<typename V::reg>;
  { V::fma(r, r, r) } -> std::same_as<typename V::reg>;
  { V::min(r, r) } -> std::same_as<typename V::reg>;
  { V::max(r, r) } -> std::same_as<typename V::reg>;
  { V::sqrt(r) } -> std::same_as<typename V::reg>;
  { V::round(r) } -> std::same_as<typename V::reg>;
  { V::magnitude(r) } -> std::same_as<typename V::reg>;
  { V::to_ints(r) } -> std::same_as<typename V::ireg>;
  { V::scale(r, r) } -> std::same_as<typename V::reg>;  // a 2^n, n whole or NaN: 0 or infinite where it leaves float32
  { V::scale_from(one, r, r, r) } -> std::same_as<typename V::reg>;
  { V::where_byte(many, count, r, r) } -> std::same_as<typename V::reg>;
  { V::sum(r) } -> std::same_as<float>;
  { V::smallest(r) } -> std::same_as<float>;
  { V::largest(r) } -> std::same_as<float>;
  V::prefetch(bytes, count, count);
  { V::load_index(bytes) } -> std::same_as<typename V::ireg>;
  { V::template shift_right<2>(i) } -> std::same_as<typename V::ireg>;
  { V::permute4(r, i) } -> std::same_as<typename V::reg>;
  { V::all_below_64(many) } -> std::convertible_to<bool>;
  { V::evens(r, r) } -> std::same_as<typename V::reg>;
  { V::odds(r, r) } -> std::same_as<typename V::reg>;
  { V::lows(r, r) } -> std::same_as<typename V::reg>;
  { V::highs(r, r) } -> std::same_as<typename V::reg>;
  { V::nibbles(i) } -> std::same_as<uint64_t>;
  V::transpose(square);
  V::transpose_quarters(four);
  { V::from_quarters(i) } -> std::same_as<typename V::ireg>;
};
static_assert(FloatLanes<Lanes>);

}  // namespace
