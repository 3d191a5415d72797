// The means of an image's answers, or of the greatest of every 2 x 2 of them, in the order in which torch adds: its bits.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include "windows.h"

namespace {

// A vector of outputs. Sums of 2^power numbers go a level up, where as many are added again; there are four levels.
template <class V, class Load>
TWOFOUR_INLINE typename V::reg mean_in_order(int64_t count, int64_t power, const Load& load) {
  typename V::reg sums[4] = {};
  for (int64_t i = 0; i < count;) {
    sums[0] += load(i++);
    for (int l = 1; l < 4 && (i & ((int64_t{1} << power * l) - 1)) == 0; l++) sums[l] += sums[l - 1], sums[l - 1] = V::zero();
  }
  return (sums[0] + sums[1] + sums[2] + sums[3]) / V::all(static_cast<float>(count));
}

template <class V>
void image_means(const BitsConv& a, const float* from, float* to) {
  const int64_t pool = a.after.pool, channels = a.out_channels, row = a.width.output * channels, across = a.width.output / pool;
  const int64_t count = a.height.output / pool * across, bits = 64 - __builtin_clzll(static_cast<uint64_t>(count));
  const int64_t power = (count & (count - 1)) == 0 ? bits - 1 : bits;  // the least whose 2^power is no less than the count
  for (int64_t c = 0; c < channels; c += V::width, from += V::width)
    V::store(to + c, mean_in_order<V>(count, power < 20 ? 4 : power / 4, [&](int64_t i) TWOFOUR_INLINED {
      const float* one = from + i / across * pool * row + i % across * pool * channels;
      auto most = V::load(one, channels - c);
      for (int64_t q = 1; q < pool * pool; q++) {
        const auto next = V::load(one + q / pool * row + q % pool * channels, channels - c);
        most = most == most ? V::max(most, next) : most;  // a NaN, the first or the second, stays
      }
      return most;
    }), channels - c);
}

}  // namespace
