// The vocabulary of vectors: what the `Lanes` of every instruction set offer, so that a kernel is written once.
#pragma once

#include <concepts>
#include <cstdint>

namespace {

// Float sums of products (lanes_*.h). `load_aligned` and `store_aligned` may want the alignment of a vector.
template <class V>
concept FloatLanes = requires(float* to, const float* from, const char* bytes, const uint8_t* many, int64_t count,
                              typename V::reg r, typename V::ireg i, typename V::reg (&square)[V::width]) {
  { V::zero() } -> std::same_as<typename V::reg>;
  { V::load_aligned(from) } -> std::same_as<typename V::reg>;
  { V::load_shared(from) } -> std::same_as<typename V::reg>;
  { V::load_unaligned(from) } -> std::same_as<typename V::reg>;
  { V::load_partial(from, count) } -> std::same_as<typename V::reg>;
  V::store_aligned(to, r);
  V::store_unaligned(to, r);
  V::store_partial(to, r, count);
  { V::broadcast(from) } -> std::same_as<typename V::reg>;
  { V::broadcast4(from) } -> std::same_as<typename V::reg>;
  { V::add(r, r) } -> std::same_as<typename V::reg>;
  { V::fma(r, from, r) } -> std::same_as<typename V::reg>;
  { V::fma(r, r, r) } -> std::same_as<typename V::reg>;
  V::prefetch(bytes, count, count);
  { V::load_index(bytes) } -> std::same_as<typename V::ireg>;
  { V::template shift_right<2>(i) } -> std::same_as<typename V::ireg>;
  { V::permute4(r, i) } -> std::same_as<typename V::reg>;
  { V::all_below_64(many) } -> std::convertible_to<bool>;
  V::transpose(square);
};

}  // namespace
