// The choice between the two ways through one head: `Wide` and `Narrow` blocks, and `C`, cells of floats, where queries
// are few. Internal linkage.
#pragma once

#include "few_queries.h"

namespace {

// `Narrow` is for head widths that are no multiple of `Wide`'s columns, such as 32.
template <class C, class Wide, class Narrow>
struct Rows {
  static bool wide(const Attention& a) { return a.value_width % Wide::kWide == 0; }

  static int64_t bytes(const Attention& a) {
    if (a.queries <= kFewQueries) return FewQueries<C>::bytes(a);
    return wide(a) ? typename Wide::Plan(a).bytes() : typename Narrow::Plan(a).bytes();
  }

  static void run(const Attention& a, int64_t begin, int64_t end, void* workspace) {
    float* floats = static_cast<float*>(workspace);
    if (a.queries <= kFewQueries) {
      FewQueries<C>::run(a, begin, end, floats);
    } else if (wide(a)) {
      Wide::run(a, begin, end, floats);
    } else {
      Narrow::run(a, begin, end, floats);
    }
  }
};

}  // namespace
