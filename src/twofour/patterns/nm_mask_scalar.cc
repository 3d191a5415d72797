// Any N:M: a value is kept when fewer than N others of its group come before it.
#include <cstring>

#include "nm_mask.h"

namespace twofour {
namespace {

// Order-preserving integer of a float; both zeros are one value. Returns false for NaN and infinities.
inline bool sort_key(float score, bool absolute, int32_t* key) {
  const float plus_zero = score + 0.0f;  // -0.0f + 0.0f is +0.0f
  int32_t bits;
  std::memcpy(&bits, &plus_zero, sizeof bits);
  const int32_t magnitude = bits & 0x7fffffff;
  *key = absolute ? magnitude : bits ^ ((bits >> 31) & 0x7fffffff);
  return magnitude < 0x7f800000;
}

}  // namespace

bool nm_mask_any_f32__scalar(const NmMask& a) {
  for (int64_t g = 0; g < a.groups; ++g) {
    int32_t key[kNmMaskMaxGroup];
    for (int i = 0; i < a.m; ++i)
      if (!sort_key(a.scores[g * a.m + i], a.absolute, &key[i])) return false;
    for (int i = 0; i < a.m; ++i) {
      int before = 0;
      for (int j = 0; j < i; ++j) before += key[j] >= key[i];
      for (int j = i + 1; j < a.m; ++j) before += key[j] > key[i];
      a.keep[g * a.m + i] = before < a.n;
    }
  }
  return true;
}

}  // namespace twofour
