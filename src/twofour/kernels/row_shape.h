// How much a row-vectorised kernel holds in registers at once. Internal linkage.
#pragma once

namespace {

// Halves (16 rows) of a unit of 32, and tokens, at most.
template <class V>
constexpr int kRowHalves = V::width == 16 ? 2 : 1;
template <class V>
constexpr int kRowTokens = V::width == 16 ? 8 : 4;

}  // namespace
