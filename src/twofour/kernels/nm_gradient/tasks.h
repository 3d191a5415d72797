// How the pruning of a gradient is cut into tasks. Internal linkage.
#pragma once

#include <cstdint>

#include "kernels/layouts/panels.h"
#include "native/integers.h"
#include "nm_gradient.h"

namespace {

constexpr int64_t kTaskTiles = 16, kTaskRows = 64;

// A task is a run of rows of one sample and a run of tiles. Rescaling needs all rows of a sample: threads without a
// sample of their own share its tiles. Runs are long, since short ones along rows that are a multiple of 4 KB apart meet
// in the same cache sets (64 columns took 3 times as long as 2048), but what is summed is read again: 1024 columns of 128
// rows stay in half a MB.
struct GradientTasks {
  int64_t rows, tiles;                   // of a task, at most
  int64_t row_runs, tile_runs, samples;  // runs of a sample; samples in all

  explicit GradientTasks(const twofour::NmGradient& a) {
    const int64_t all = ceil_div(a.columns, twofour::kPanelTile), tokens = a.tokens > 0 ? a.tokens : 1;
    const bool whole = a.mode == twofour::GradientMode::rescaled;
    rows = whole ? tokens : kTaskRows;
    const int64_t shares = ceil_div(a.threads > 1 ? a.threads : 1, a.samples > 0 ? a.samples : 1);
    tiles = !whole ? all : least(ceil_div(all, shares), kTaskTiles);
    row_runs = ceil_div(tokens, rows);
    tile_runs = ceil_div(all, tiles);
    samples = a.samples;
  }
  int64_t count() const { return samples * row_runs * tile_runs; }
};

}  // namespace
