// Whole numbers: what every cutting of work into blocks needs. Internal linkage.
#pragma once

#include <cstdint>

namespace {

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t n, int64_t step) { return ceil_div(n, step) * step; }

}  // namespace
