// What an N:M mask keeps of stripes (M columns that share their groups): the sums that a search for a better order of
// the columns asks for. Every instruction set adds in the same order, so that all of them find the same permutation.
#pragma once

#include <cstdint>

#include "native/table.h"

namespace twofour {

constexpr int64_t kStripeLanes = 16;  // rows are padded with zeros to a multiple of it
constexpr int64_t kStripeChunk = 8;   // vectors of a column that are looked at together
constexpr int kStripeMaxWindow = 24;  // columns of a group of stripes

// sums[s] = what the mask keeps of the columns subsets[s * m ...], for `count` subsets of the `width` columns.
// `scratch`: scratch_floats(width, count) floats, aligned to 64 bytes.
struct SubsetSums {
  const float* const* columns;  // each `rows` values >= 0, aligned to 64 bytes
  int width, n, m;
  int64_t rows;
  const uint8_t* subsets;
  int64_t count;
  double* sums;
  float* scratch;

  static int64_t scratch_floats(int64_t width, int64_t count) {
    return kStripeLanes * (count + width * (width - 1) * kStripeChunk);
  }
};

// The n-th largest value of each row of m - 1 columns goes to `least`; the answer is the sum of the n - 1 larger ones.
// What a stripe of them and a further column x keeps is the answer plus sum of max(least, x).
struct StripeRest {
  const float* const* columns;
  int n, m;
  int64_t rows;
  float* least;
};

// out[s * count + j] = sum over rows of max(least[s * rows + ...], columns[j][...]), for stripes [begin, end).
struct MaxSums {
  const float* least;
  const float* const* columns;
  int64_t count, rows, begin, end;
  double* out;
};

struct StripeKernel {
  void (*subsets)(const SubsetSums&);
  double (*rest)(const StripeRest&);
  void (*maxima)(const MaxSums&);
};

#define TWOFOUR_ROW(symbol, ...) StripeKernel symbol();
#include "stripes.inc"
#undef TWOFOUR_ROW

// A search over `count` columns in the order `order` (positions -> columns), changed in place to a better one.
struct StripeSearch {
  const StripeKernel* kernel;
  const float* columns;  // column c starts at columns + c * rows
  int64_t rows, count;
  int n, m;
  uint64_t seed;
  int threads;
  int64_t* order;
  void (*tell)(void* told, int64_t done, int64_t of);  // groups a long pass has looked at, now and then; may throw
  void* told;
};

// Tries every way to deal the columns of each `window` / m stripes, applies the best, until nothing gains; then at most
// `escapes` times leaves the local optimum and keeps what is better. Returns how many groups of stripes were looked at.
int64_t refine_stripes(const StripeSearch& search, int window, int64_t escapes);

// Deals the stripes into random blocks of `block`, takes one column out of every stripe and gives those of a block back in
// the best of all ways (linear assignment); at most `rounds` times, and until `patience` rounds in a row gained nothing.
// Returns how many rounds were run.
int64_t assign_stripes(const StripeSearch& search, int64_t block, int64_t rounds, int64_t patience);

}  // namespace twofour
