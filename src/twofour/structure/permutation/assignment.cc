// Column reduction, bids of free rows, then shortest augmenting paths, O(count^3) at worst (Jonker and Volgenant 1987).
#include "assignment.h"

#include <limits>

namespace twofour {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Assignment {
  const double* gain;
  int64_t count;
  std::vector<double> price, distance;  // of columns
  std::vector<double> potential;        // of rows
  std::vector<int32_t> row_of, column_of, via;
  std::vector<char> done;

  double cost(int64_t row, int64_t column) const { return -gain[row * count + column]; }

  // Each column costs its cheapest row, which takes it unless it has another.
  void start() {
    for (int64_t j = 0; j < count; ++j) price[j] = kInfinity;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < count; ++j)
        if (cost(i, j) < price[j]) price[j] = cost(i, j), via[j] = static_cast<int32_t>(i);
    for (int64_t j = count; j-- > 0;)
      if (column_of[via[j]] < 0) take(via[j], j);
  }

  void take(int64_t row, int64_t column) {
    row_of[column] = static_cast<int32_t>(row), column_of[row] = static_cast<int32_t>(column);
  }

  // Free rows bid for their cheapest column as much as the second cheapest allows; who loses it bids next.
  void bid() {
    std::vector<int32_t> free;
    for (int64_t i = 0; i < count; ++i)
      if (column_of[i] < 0) free.push_back(static_cast<int32_t>(i));
    for (int64_t bids = 0, at = 0; at < static_cast<int64_t>(free.size()) && bids < 8 * count; ++bids) {
      const int64_t row = free[at++];
      int64_t best = -1, second = -1;
      double least = kInfinity, next = kInfinity;
      for (int64_t j = 0; j < count; ++j) {
        const double reduced = cost(row, j) - price[j];
        if (reduced >= next) continue;
        if (reduced < least)
          next = least, second = best, least = reduced, best = j;
        else
          next = reduced, second = j;
      }
      const double lower = price[best] - (next - least);
      const bool lowers = lower < price[best];
      if (lowers)
        price[best] = lower;
      else if (row_of[best] >= 0 && second >= 0)
        best = second;
      const int32_t loser = row_of[best];
      take(row, best);
      if (loser < 0) continue;
      column_of[loser] = -1;
      if (lowers) free[--at] = loser;
    }
  }

  // Finds the cheapest alternating path from a free row to a free column and turns it over.
  void augment(int64_t free_row) {
    for (int64_t j = 0; j < count; ++j) {
      distance[j] = cost(free_row, j) - potential[free_row] - price[j];
      via[j] = static_cast<int32_t>(free_row);
      done[j] = 0;
    }
    int64_t column = -1;
    double reached = 0;
    while (true) {
      column = -1;
      for (int64_t j = 0; j < count; ++j)
        if (!done[j] && (column < 0 || distance[j] < distance[column])) column = j;
      reached = distance[column];
      if (row_of[column] < 0) break;
      done[column] = 1;
      const int64_t row = row_of[column];
      const double base = reached - potential[row];
      for (int64_t j = 0; j < count; ++j) {
        const double through = base + cost(row, j) - price[j];
        if (!done[j] && through < distance[j]) distance[j] = through, via[j] = static_cast<int32_t>(row);
      }
    }
    for (int64_t j = 0; j < count; ++j)
      if (done[j]) price[j] += distance[j] - reached, potential[row_of[j]] += reached - distance[j];
    potential[free_row] += reached;
    while (true) {
      const int32_t row = via[column], next = column_of[row];
      take(row, column);
      if (row == free_row) break;
      column = next;
    }
  }
};

}  // namespace

std::vector<int32_t> assign(const double* gain, int64_t count) {
  Assignment a{gain, count, std::vector<double>(count), std::vector<double>(count), std::vector<double>(count),
               std::vector<int32_t>(count, -1), std::vector<int32_t>(count, -1), std::vector<int32_t>(count),
               std::vector<char>(count)};
  a.start();
  a.bid();
  for (int64_t i = 0; i < count; ++i)
    if (a.column_of[i] >= 0) a.potential[i] = a.cost(i, a.column_of[i]) - a.price[a.column_of[i]];
  for (int64_t i = 0; i < count; ++i)
    if (a.column_of[i] < 0) a.augment(i);
  return a.column_of;
}

}  // namespace twofour
