#include <immintrin.h>

#include "codes.h"
#include "nm_compress.h"
#include "patterns/keep_avx2.h"

namespace twofour {
namespace {

// Two kept values of a group move to the front: byte shuffles by the group's keep bits (two of four are set).
struct Fronts {
  uint8_t of[16][16] = {};
  constexpr Fronts() {
    for (int bits = 0; bits < 16; ++bits)
      for (int i = 0, to = 0; i < 4; ++i)
        if (bits >> i & 1 && to < 16)
          for (int byte = 0; byte < 4; ++byte) of[bits][to++] = static_cast<uint8_t>(4 * i + byte);
  }
};
constexpr Fronts kFronts;

// Up to two groups; returns how many non-zero values were dropped.
inline int64_t compress_groups(__m256 x, int groups, float* values, uint8_t* indices) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i key = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const int keep = keep_two_of_four(key);
  const int zero = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(key, _mm256_setzero_si256())));
  const __m128i halves[2] = {_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)};
  for (int g = 0; g < groups; ++g) {
    const __m128i control = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kFronts.of[keep >> (4 * g) & 15]));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(values + 2 * g), _mm_shuffle_epi8(halves[g], control));
  }
  const int real = groups == 2 ? 0xff : 0x0f;
  *indices = kCodes.of[keep & real];
  return __builtin_popcount(~keep & ~zero & real);
}

inline int64_t compress_row(const float* w, int64_t columns, float* values, uint8_t* indices) {
  int64_t dropped = 0, i = 0;
  for (; i + 8 <= columns; i += 8) dropped += compress_groups(_mm256_loadu_ps(w + i), 2, values + i / 2, indices + i / 8);
  if (i < columns) {
    const __m256 last = _mm256_insertf128_ps(_mm256_setzero_ps(), _mm_loadu_ps(w + i), 0);
    dropped += compress_groups(last, 1, values + i / 2, indices + i / 8);
  }
  return dropped;
}

}  // namespace

int64_t nm_compress_2x4_f32__avx2(const NmCompress& a) { return compress_rows(a, compress_row); }

}  // namespace twofour
