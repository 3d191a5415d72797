// One loop shared by a team: bodies that need no barrier.
#pragma once

#include <cstdint>

#include "native/team.h"

namespace twofour {

// Calls body(begin, end) on contiguous shares of [0, count), each share a multiple of `grain` except the last.
// The body must not throw, as that of a team.
template <class Body>
static inline void parallel_for(int64_t count, int64_t grain, int threads, const Body& body) {
  if (threads > 1 && count > grain) {
    with_team(threads, [&](const Team& team) {
      int64_t begin, end;
      team.share(count, grain, &begin, &end);
      if (begin < end) body(begin, end);
    });
  } else if (count > 0) {
    body(int64_t{0}, count);
  }
}

}  // namespace twofour
