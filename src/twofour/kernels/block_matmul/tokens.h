// Tokens as kernels read them: rows of dwords with zeros behind them, and panels, in which tokens are lanes.
// Included once per instruction set; everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "blocks.h"
#include "kernels/matmul.h"
#include "native/caches.h"
#include "native/compiler.h"

namespace {

using twofour::half_second_level;  // bytes of tokens per pass over the weights
using twofour::Matmul;

// One token as the dots read it; what stands behind its inputs is zero.
template <class D>
inline void token_row(const Matmul& a, const Blocks& b, int64_t token, char* to, typename D::Token* kept) {
  const int64_t given = a.in_features * (4 / D::per);
  D::copy_token(a, token, to, kept);
  std::memset(to + given, 0, static_cast<size_t>(b.shape.token_bytes() - given));
}

// Bytes of scratch in which a member makes the rows of one panel's vector.
template <class D>
inline int64_t rows_bytes(const Blocks& b) {
  return D::V::width * (b.shape.token_bytes() + round_up(b.shape.places() * 4, 64) * (b.shape.run == 0 && D::per > 1));
}

// Each input of a row, repeated to fill a dword.
template <class Element>
inline void repeat_elements(const char* row, int64_t count, uint32_t* to) {
  constexpr uint32_t times = sizeof(Element) == 1 ? 0x01010101u : 0x00010001u;
  const auto* from = reinterpret_cast<const Element*>(row);
  for (int64_t i = 0; i < count; i++) to[i] = from[i] * times;
}

// `tokens` <= V::width tokens from `first` on -> to[place][stride], lanes past `tokens` zero.
template <class D>
TWOFOUR_NOINLINE void panel_vector(const Matmul& a, const Blocks& b, int64_t first, int64_t tokens, char* scratch,
                                   float* to, int64_t stride, typename D::Token* kept) {
  using V = typename D::V;
  const int64_t bytes = b.shape.token_bytes(), places = round_up(b.shape.places(), V::width);
  const bool apart = b.shape.run == 0 && D::per > 1;
  const int64_t apart_bytes = round_up(b.shape.places() * 4, 64);
  const char* rows[V::width];
  for (int64_t t = 0; t < tokens; t++) {
    char* row = scratch + t * bytes;
    token_row<D>(a, b, first + t, row, kept + t);
    rows[t] = row;
    if (!apart) continue;
    auto* wide = reinterpret_cast<uint32_t*>(scratch + V::width * bytes + t * apart_bytes);
    if (D::per == 2) repeat_elements<uint16_t>(row, places, wide);
    else repeat_elements<uint8_t>(row, places, wide);
    rows[t] = reinterpret_cast<const char*>(wide);
  }
  for (int64_t k = 0; k < places; k += V::width) {
    typename V::reg square[V::width];
    TWOFOUR_UNROLL
    for (int t = 0; t < V::width; t++)
      square[t] = t < tokens ? V::load_unaligned(reinterpret_cast<const float*>(rows[t]) + k) : V::zero();
    V::transpose(square);
    TWOFOUR_UNROLL
    for (int i = 0; i < V::width; i++) V::store_unaligned(to + (k + i) * stride, square[i]);
  }
}

}  // namespace
