// Images of few channels: a line for each channel of a row, so that outputs next to each other read floats next to each other.
#pragma once

#include <cstdint>

#include "kernels/packed_axis.h"
#include "native/team.h"
#include "unit.h"

namespace {

// Else one tap is one run of channels, which the table of a block finds where it stands.
inline bool by_lines(const DenseConv& a) {
  return twofour::takes_planes(a.in_channels, a.groups, a.height, a.width) && (a.plane != 0 || a.width.taps > 1);
}

// Neighbours of a row of outputs. Their k-th inputs of a tap stand next to each other, `pitch` floats behind those before.
template <class V>
struct LineBlock {
  static constexpr int most = V::width == 16 ? 14 : V::width == 8 ? 6 : 4;  // registers for their sums
  struct Run {
    const float* from;
    int64_t weight;  // floats behind the panel's first
  };
  struct Window {
    static constexpr bool table = false;
    const float* from;
    int64_t weight, pitch;
    TWOFOUR_INLINE const float* input(int t, int64_t k) const { return from + k * pitch + t; }
  };
  int64_t pixels, runs, first, column, pitch;  // first, column: of the answer, of its row
  const Run* run;
  int64_t pixel(int64_t t) const { return first + t; }
  TWOFOUR_INLINE Window window(int64_t i) const { return {run[i].from + column, run[i].weight, pitch}; }
};

template <class V>
struct LinePlan {
  using Block = LineBlock<V>;
  PackedAxis width;
  int64_t pitch, row;               // floats from line to line, from row to row: their channels
  int64_t taps, kept;               // of a window; bytes that a member of a team keeps
  int64_t panels, blocks;           // of the answer's channels, of its rows

  explicit LinePlan(const DenseConv& a)
      : width(a.width, a.width.output), pitch((ceil_div(width.positions, 16) | 1) * 16), row(pitch * a.in_channels),
        taps(a.height.taps * a.width.taps),
        kept(round_up(a.height.taps * row * 4 + taps * int64_t{sizeof(typename Block::Run)}, 64)),
        panels(ceil_div(a.out_channels, kConvPanel)), blocks(ceil_div(a.width.output, Block::most)) {}
  int64_t bytes(int64_t threads) const { return kept * (threads > 1 ? threads : 1); }
};

// Floats `step` apart, next to each other.
template <class V>
void gather(float* to, const float* from, int64_t count, int64_t step) {
  int64_t i = 0;
  if (step == 1)
    for (; i + V::width <= count; i += V::width) V::store_unaligned(to + i, V::load_unaligned(from + i));
  if (step == 2)  // the float behind the last one may be another's
    for (; i + V::width < count; i += V::width)
      V::store_unaligned(to + i, V::evens(V::load_unaligned(from + 2 * i), V::load_unaligned(from + 2 * i + V::width)));
  for (; i < count; i++) to[i] = from[i * step];
}

template <class V>
struct DirectLines {
  using Block = LineBlock<V>;
  const DenseConv& a;
  const LinePlan<V>& plan;
  const Fetched written;
  float* lines;  // row r of the image stands at r modulo the taps
  typename Block::Run* runs;

  DirectLines(const DenseConv& given, const LinePlan<V>& cut, char* mine)
      : a(given), plan(cut), written(Block::most * a.out_channels * 4, plan.panels, plan.taps * a.in_channels),
        lines(reinterpret_cast<float*>(mine)),
        runs(reinterpret_cast<typename Block::Run*>(lines + a.height.taps * plan.row)) {}

  // Pixels of a line from column `first` on, a stride apart; zeros where none are.
  void fill_slot(float* to, int64_t count, int64_t first, const float* line, int64_t across) const {
    const int64_t stride = a.width.stride, end = a.width.input;
    const int64_t before = first < 0 ? least(count, ceil_div(-first, stride)) : 0;
    const int64_t behind = first < end ? least(count, ceil_div(end - first, stride)) : 0;
    for (int64_t p = 0; p < before; p++) to[p] = 0;
    if (before < behind)
      gather<V>(to + before, line + (first + before * stride) * across, behind - before, stride * across);
    for (int64_t p = before < behind ? behind : before; p < count; p++) to[p] = 0;
  }
  void fill(int64_t row, const float* image) const {
    const int64_t across = a.plane ? 1 : a.in_channels, apart = a.plane ? a.plane : 1;
    const PackedAxis& w = plan.width;
    for (int64_t c = 0; c < a.in_channels; c++) {
      float* to = lines + row % a.height.taps * plan.row + c * plan.pitch;
      const float* line = image + row * a.width.input * across + c * apart;
      for (int64_t s = 0; s < w.slots; s++) {
        const int64_t next = s + 1 < w.slots ? w.start[s + 1] : w.positions;
        fill_slot(to + w.start[s], next - w.start[s], w.phase[s] - a.width.padding, line, across);
      }
    }
  }

  // A row of the answer, which reads rows [first, last) of the image from tap `tap` on.
  void multiply(int64_t row, int64_t image, int64_t first, int64_t last, int64_t tap) const {
    Block block{0, 0, 0, 0, plan.pitch, runs};
    for (int64_t r = first; r < last; r++, tap++)
      for (int64_t j = 0; j < a.width.taps; j++)
        runs[block.runs++] = {lines + r % a.height.taps * plan.row + plan.width.tap[j],
                              (tap * a.width.taps + j) * a.in_channels * kConvPanel};
    for (int64_t b = 0; b < plan.blocks; b++) {
      block.column = a.width.output * b / plan.blocks;
      block.first = row * a.width.output + block.column;
      block.pixels = a.width.output * (b + 1) / plan.blocks - block.column;
      const float* next = a.y + ((image * a.height.output + row) * a.width.output + block.column + block.pixels) * a.out_channels;
      for (int64_t panel = 0; panel < plan.panels; panel++) {
        DirectPanel p{a.weight + panel * plan.taps * a.in_channels * kConvPanel, a.in_channels};
        p.read = p.added = p.written = {reinterpret_cast<const char*>(p.weight), 0};
        if (b + 1 < plan.blocks) p.written = written.part(next, panel);
        multiply_block<V>(a, block, 0, panel, image, p);
      }
    }
  }

  void run(const Team& team) const {
    int64_t begin, end, filled = 0;
    team.share(a.images * a.height.output, 1, &begin, &end);
    for (int64_t r = begin; r < end; r++) {
      const int64_t image = r / a.height.output, row = r % a.height.output;
      const int64_t origin = row * a.height.stride - a.height.padding, first = origin < 0 ? 0 : origin;
      const int64_t last = least(origin + a.height.taps, a.height.input);
      const float* from = a.x + image * a.height.input * a.width.input * a.in_channels;
      if (row == 0 || filled < first) filled = first;
      for (; filled < last; filled++) fill(filled, from);
      multiply(row, image, first, last, first - origin);
    }
  }
};

template <class V>
void direct_by_lines(const DenseConv& a) {
  const LinePlan<V> plan(a);
  with_team(a.threads, [&](const Team& team) {
    DirectLines<V>(a, plan, static_cast<char*>(a.workspace) + team.me * plan.kept).run(team);
  });
}

}  // namespace
