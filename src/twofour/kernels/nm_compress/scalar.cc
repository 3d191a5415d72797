#include <cstring>

#include "codes.h"
#include "nm_compress.h"

namespace twofour {
namespace {

inline uint32_t magnitude(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x7fffffffu;
}

// The two kept positions of a group, ascending, as one nibble.
inline uint8_t keep_two_of_four(const float* group) {
  uint32_t key[4];
  for (int i = 0; i < 4; ++i) key[i] = magnitude(group[i]);
  int kept[4], count = 0;
  for (int i = 0; i < 4; ++i) {
    int before = 0;
    for (int j = 0; j < 4; ++j) before += key[j] > key[i] || (key[j] == key[i] && j < i);
    if (before < 2) kept[count++] = i;
  }
  return static_cast<uint8_t>(kept[0] | kept[1] << 2);
}

inline int64_t compress_row(const float* w, int64_t columns, float* values, uint8_t* indices) {
  int64_t dropped = 0;
  for (int64_t g = 0; g < columns / 4; ++g) {
    const uint8_t code = keep_two_of_four(w + 4 * g);
    values[2 * g] = w[4 * g + (code & 3)];
    values[2 * g + 1] = w[4 * g + (code >> 2)];
    for (int i = 0; i < 4; ++i) dropped += i != (code & 3) && i != code >> 2 && w[4 * g + i] != 0.0f;
    if (g % 2 == 0) indices[g / 2] = code;
    else indices[g / 2] = static_cast<uint8_t>(indices[g / 2] | code << 4);
  }
  return dropped;
}

}  // namespace

int64_t nm_compress_2x4_f32__scalar(const NmCompress& a) { return compress_rows(a, compress_row); }

}  // namespace twofour
