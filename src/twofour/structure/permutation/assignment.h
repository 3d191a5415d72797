// The linear assignment problem: give each of `count` rows its own column so that the sum of `gain` is largest.
#pragma once

#include <cstdint>
#include <vector>

namespace twofour {

// gain is (count, count), row by row; the answer holds the column of each row.
std::vector<int32_t> assign(const double* gain, int64_t count);

}  // namespace twofour
