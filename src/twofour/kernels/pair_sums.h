// The inner loop of kernels that read the layout "pairs": two rows at a time, an input that both keep is loaded once for
// two multiply-adds. Included once per instruction set; internal linkage.
#pragma once

#include <cstdint>

#include "kernels/half_vectors.h"
#include "kernels/layouts/pair_check.h"
#include "kernels/layouts/pairs.h"
#include "native/compiler.h"

namespace {

using twofour::kPairHead;
using twofour::kPairRecord;
using twofour::kPairRows;
using twofour::kPairTileBytes;
using twofour::kPanelTile;
using twofour::padding_of;

// The sums of one row: U vectors, of which the last one may be a half.
template <class V, int U, bool half>
struct RowSums {
  using Half = HalfOf<V>;
  static constexpr int whole = half ? U - 1 : U;
  typename V::reg vectors[U];
  typename Half::reg last;

  TWOFOUR_INLINE void clear() {
    TWOFOUR_UNROLL
    for (int u = 0; u < whole; u++) vectors[u] = V::zero();
    if constexpr (half) last = Half::zero();
  }
  TWOFOUR_INLINE void add(typename V::reg weight, const float* x) {
    TWOFOUR_UNROLL
    for (int u = 0; u < whole; u++) vectors[u] = V::fma(weight, x + u * V::width, vectors[u]);
    if constexpr (half) last = Half::fma(Half::lower(weight), Half::load(x + whole * V::width), last);
  }
  TWOFOUR_INLINE void finish(bool first, float* y) const {
    TWOFOUR_UNROLL
    for (int u = 0; u < whole; u++) {
      float* at = y + u * V::width;
      V::store_aligned(at, first ? vectors[u] : vectors[u] + V::load_aligned(at));
    }
    if constexpr (half) {
      float* at = y + whole * V::width;
      Half::store(at, first ? last : last + Half::load(at));
    }
  }
};

// The sums of two rows. `Inputs` says where an input of the tile stands.
template <class V, int U, bool half, class Inputs>
struct PairSums {
  RowSums<V, U, half> a, b;

  static TWOFOUR_INLINE const float* row_of(const Inputs& x, uint8_t input) {
    const char* row = x.at(input);
    asm("" : "+r"(row));  // one base register: an FMA with an indexed operand splits in two on Intel
    return reinterpret_cast<const float*>(row);
  }
  TWOFOUR_INLINE void add_shared(const float* values, const Inputs& x, uint8_t input) {
    using Half = HalfOf<V>;
    const float* row = row_of(x, input);
    const typename V::reg wa = V::broadcast(values), wb = V::broadcast(values + 1);
    TWOFOUR_UNROLL
    for (int u = 0; u < a.whole; u++) {
      const typename V::reg v = V::load_shared(row + u * V::width);
      a.vectors[u] = V::fma(wa, v, a.vectors[u]);
      b.vectors[u] = V::fma(wb, v, b.vectors[u]);
    }
    if constexpr (half) {
      const typename Half::reg v = Half::load_shared(row + a.whole * V::width);
      a.last = Half::fma(Half::lower(wa), v, a.last);
      b.last = Half::fma(Half::lower(wb), v, b.last);
    }
  }
  static TWOFOUR_INLINE void add_single(const float* value, const Inputs& x, uint8_t input, RowSums<V, U, half>* sums) {
    sums->add(V::broadcast(value), row_of(x, input));
  }
  // One record, the first `shared` inputs (even) of both rows, of which the last `padding` (even) are left out.
  TWOFOUR_INLINE void add_record(const char* record, int shared, int padding, const Inputs& x) {
    const float* values = reinterpret_cast<const float*>(record);
    const auto* input = reinterpret_cast<const uint8_t*>(record + kPanelTile * 4);
    const int out = padding < shared ? padding : shared;
    for (int i = shared - out; i > 0; i -= 2, values += 4, input += 2) {
      add_shared(values, x, input[0]);
      add_shared(values + 2, x, input[1]);
    }
    values += 2 * out, input += out;
    for (int i = kPanelTile / 2 - shared; i > 0; i -= 2, values += 4, input += 4) {
      add_single(values, x, input[0], &a);
      add_single(values + 1, x, input[1], &b);
      add_single(values + 2, x, input[2], &a);
      add_single(values + 3, x, input[3], &b);
    }
  }
  TWOFOUR_INLINE void clear() {
    a.clear();
    b.clear();
  }
};

}  // namespace
