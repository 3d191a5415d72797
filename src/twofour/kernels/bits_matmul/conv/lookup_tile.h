// The sums of lookups of some pixels and vectors of weights: the inner loop of convolutions by tables.
// Included by AVX-512 sources with VBMI; internal linkage.
#pragma once

#include <cstdint>

#include "native/simd.h"

namespace {

constexpr int64_t kMostSlots = 8;  // of 32 sums of 16 bits that a pixel has: of all planes of a panel, or of some panels

// Groups of inputs that pass together.
struct LookupPass {
  const int32_t* places;   // of their tables behind a window's first one, in bytes
  int64_t count;
  const uint8_t* weights;  // of the first vector
  int64_t vector;          // bytes from one vector to the next
  int64_t per_byte;        // lookups whose sum fits a byte
  const int16_t* planes;   // what the planes of a pair count: 32 pairs of bytes of every two vectors
  int64_t pixel, reach;    // bytes from a window to the next one's, and to its own last tables of a row
  bool first;              // else sums are added to
};

// Adds, of twelve sums and more as an instruction of its own: of the builtin gcc 12 makes those in new registers and copies
// them in every round.
template <bool Own>
TWOFOUR_INLINE void add_found(__m512i& sum, __m512i found) {
  if constexpr (Own) asm("vpaddb %1, %0, %0" : "+v"(sum) : "v"(found));
  else sum = _mm512_add_epi8(sum, found);
}

// Sums of T pixels and V vectors to `sums`, of a pixel `stride` numbers, 32 of a slot. Bytes 2 j and 2 j + 1 of a vector are,
// of `Pairs`, two planes of output j, whose slot is the sum of what they count. Else they are outputs j and 32 + j of a plane,
// two slots: the even bytes are the sums of words less the odd ones, modulo 2^16 no mask.
template <bool Pairs, int T, int V>
TWOFOUR_NOINLINE void lookup_tile(const LookupPass& pass, const uint8_t* const* pixels, uint16_t* sums, int64_t stride) {
  constexpr int slots = Pairs ? 1 : 2;
  __m512i words[T][V][slots] = {};
  const uint8_t* pixel[T];
  TWOFOUR_UNROLL
  for (int t = 0; t < T; t++) pixel[t] = pixels[t];
  const int32_t *place = pass.places, *end = place + pass.count;
  const uint8_t* w = pass.weights;
  const int64_t vector = pass.vector, ahead = T * pass.pixel + pass.reach;  // to what the next tile reads and this one does not
  while (place != end) {
    const int32_t* stop = end - place > pass.per_byte ? place + pass.per_byte : end;
    __m512i bytes[T][V];
    const auto look = [&](bool begin) __attribute__((always_inline)) {
      __m512i index[V];
      const int64_t at = *place++;
      TWOFOUR_UNROLL  // of single planes fetching was slower
      for (int t = 0; Pairs && (t == 0 || t + 3 <= T); t += 3) __builtin_prefetch(pixel[t] + at + ahead);
      TWOFOUR_UNROLL
      for (int v = 0; v < V; v++) {
        index[v] = _mm512_load_si512(w + v * vector);
        asm("" : "+v"(index[v]));  // else gcc loads it again for every pixel
      }
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) {
        __m512i table = _mm512_load_si512(pixel[t] + at);
        if constexpr (V > 1) asm("" : "+v"(table));
        TWOFOUR_UNROLL
        for (int v = 0; v < V; v++) {
          const __m512i found = _mm512_permutexvar_epi8(index[v], table);
          if (begin) bytes[t][v] = found;
          else add_found<Pairs>(bytes[t][v], found);
        }
      }
      w += 64;
    };
    look(true);
    while (place != stop) look(false);
    TWOFOUR_UNROLL
    for (int v = 0; v < V; v++) {
      TWOFOUR_UNROLL
      for (int t = 0; t < T; t++) {
        if constexpr (Pairs) {
          const __m512i count = _mm512_load_si512(pass.planes + v / 2 * 32);
          words[t][v][0] = _mm512_add_epi16(words[t][v][0], _mm512_maddubs_epi16(bytes[t][v], count));
        } else {
          words[t][v][0] = _mm512_add_epi16(words[t][v][0], bytes[t][v]);
          words[t][v][1] = _mm512_add_epi16(words[t][v][1], _mm512_srli_epi16(bytes[t][v], 8));
        }
      }
    }
  }
  TWOFOUR_UNROLL
  for (int t = 0; t < T; t++) {
    TWOFOUR_UNROLL
    for (int v = 0; v < V; v++) {
      if constexpr (!Pairs) words[t][v][0] = _mm512_sub_epi16(words[t][v][0], _mm512_slli_epi16(words[t][v][1], 8));
      TWOFOUR_UNROLL
      for (int s = 0; s < slots; s++) {
        uint16_t* to = sums + t * stride + (v * slots + s) * 32;
        const __m512i sum = words[t][v][s];
        _mm512_store_si512(to, pass.first ? sum : _mm512_add_epi16(_mm512_load_si512(to), sum));
      }
    }
  }
}

struct LookupShape {
  int64_t pixels, vectors;
  void (*run)(const LookupPass&, const uint8_t* const*, uint16_t*, int64_t);
};

template <bool Pairs, int T, int V>
constexpr LookupShape kLookupShape = {T, V, lookup_tile<Pairs, T, V>};

// The tile for so many pixels and vectors of pairs: twelve sums of bytes and as many of words at once, sixteen where one pixel
// would be left.
inline LookupShape pair_shape(int64_t pixels, int64_t vectors) {
  if (vectors >= 4) {
    if (pixels == 4) return kLookupShape<true, 4, 4>;
    if (pixels >= 3) return kLookupShape<true, 3, 4>;
    return pixels == 2 ? kLookupShape<true, 2, 4> : kLookupShape<true, 1, 4>;
  }
  if (pixels >= 6) return kLookupShape<true, 6, 2>;
  if (pixels >= 3) return kLookupShape<true, 3, 2>;
  return pixels == 2 ? kLookupShape<true, 2, 2> : kLookupShape<true, 1, 2>;
}

// The same for vectors of one plane: eight sums of bytes and sixteen of words.
inline LookupShape single_shape(int64_t pixels, int64_t vectors) {
  if (vectors >= 4) return pixels >= 2 ? kLookupShape<false, 2, 4> : kLookupShape<false, 1, 4>;
  if (vectors >= 2) {
    if (pixels >= 4) return kLookupShape<false, 4, 2>;
    return pixels >= 2 ? kLookupShape<false, 2, 2> : kLookupShape<false, 1, 2>;
  }
  if (pixels >= 8) return kLookupShape<false, 8, 1>;
  if (pixels >= 4) return kLookupShape<false, 4, 1>;
  return pixels >= 2 ? kLookupShape<false, 2, 1> : kLookupShape<false, 1, 1>;
}

}  // namespace
