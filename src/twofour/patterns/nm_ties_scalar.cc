#include "magnitudes.h"

namespace twofour {
namespace {

template <class Value>
inline bool tied(const Value* values, int64_t step, const NmTies& a) {
  Value best[kNmTiesMaxGroup + 1] = {};  // the n + 1 largest, descending
  for (int i = 0; i < a.m; ++i) {
    Value now = magnitude(values[i * step], a.sign);
    for (int k = 0; k <= a.n; ++k)
      if (best[k] < now) {
        const Value next = best[k];
        best[k] = now;
        now = next;
      }
  }
  return best[a.n - 1] == best[a.n] && best[a.n] != 0;
}

template <class Value>
int64_t run(const NmTies& a) {
  const auto* values = static_cast<const Value*>(a.values);
  const int64_t groups = a.outer * (a.length / a.m);
  const bool four = a.n == 2 && a.m == 4;
  int64_t ties = 0;
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t i = 0; i < a.inner; ++i) {
      const Value* first = values + g * a.m * a.inner + i;
      ties += four ? tied_four(first, a.inner, a.sign) : tied(first, a.inner, a);
    }
  return ties;
}

}  // namespace

int64_t nm_ties_any_b8__scalar(const NmTies& a) { return run<uint8_t>(a); }
int64_t nm_ties_any_b16__scalar(const NmTies& a) { return run<uint16_t>(a); }
int64_t nm_ties_any_b32__scalar(const NmTies& a) { return run<uint32_t>(a); }
int64_t nm_ties_any_b64__scalar(const NmTies& a) { return run<uint64_t>(a); }

}  // namespace twofour
