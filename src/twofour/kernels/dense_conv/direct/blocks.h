// The direct convolution: where the windows of a block stand, the blocks of a chunk by every panel.
#pragma once

#include <cstdint>
#include <cstring>

#include "lines.h"
#include "native/team.h"
#include "unit.h"

namespace {

template <class V>
struct Direct {
  using Plan = DirectPlan<V>;
  using Block = typename Plan::Block;
  const DenseConv& a;
  Plan plan;
  float *zeros, *copied;  // what stands outside; the image, if it is copied
  char* tables;           // of the blocks of a chunk

  explicit Direct(const DenseConv& given)
      : a(given), plan(given), zeros(static_cast<float*>(given.workspace)), copied(zeros + plan.zero_bytes() / 4),
        tables(reinterpret_cast<char*>(copied) + round_up(plan.image_bytes(given), 64)) {}

  Block& block(int64_t in_chunk) const { return *reinterpret_cast<Block*>(tables + in_chunk * plan.block_bytes()); }

  // Pixels `from` of an axis that some tap meets.
  static bool met(const ConvAxis& axis, int64_t at) { return axis.taps > 1 || (at + axis.padding) % axis.stride == 0; }

  void copy_rows(const float* image, int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end; row++) {
      if (!met(a.height, row)) continue;
      for (int64_t at = row * a.width.input; at < (row + 1) * a.width.input; at++)
        if (met(a.width, at - row * a.width.input))
          std::memcpy(copied + at * plan.pitch, image + at * a.in_channels, static_cast<size_t>(a.in_channels) * 4);
    }
  }

  // Where the runs of pixel t begin; `at`: its first row and column in the image.
  void add_pixel(Block& to, int64_t t, const float* image, int64_t row, int64_t column) const {
    const ConvAxis &h = a.height, &w = a.width;
    typename Plan::Run* run = to.run;
    for (int64_t i = 0; i < h.taps; i++, row += h.dilation) {
      const bool outside = row < 0 || row >= h.input;
      const float* from = image + row * w.input * plan.pitch;
      for (int64_t j = 0, at = column; j < w.taps; j++, at += w.dilation)
        run++->from[t] = outside || at < 0 || at >= w.input ? zeros : from + at * plan.pitch;
    }
  }
  // The same where nothing is outside.
  void add_inside(Block& to, int64_t t, const float* from) const {
    typename Plan::Run* run = to.run;
    run->from[t] = from;
    if (plan.runs == 1) return;
    const int64_t down = a.height.dilation * a.width.input * plan.pitch, right = a.width.dilation * plan.pitch;
    for (int64_t i = 0; i < a.height.taps; i++, from += down)
      for (int64_t j = 0; j < a.width.taps; j++) run++->from[t] = from + j * right;
  }

  void prepare(int64_t index, int64_t in_chunk, const float* image) const {
    const Region& region = plan.region_of(index);
    const int64_t begin = region.first(index - region.block), end = region.first(index - region.block + 1);
    const int64_t side = region.down ? region.rows : region.columns;
    Block& to = block(in_chunk);
    to.pixels = end - begin;
    int64_t line = begin / side, along = begin % side;
    for (int64_t t = 0; t < to.pixels; t++) {
      int64_t row = region.row + (region.down ? along : line), column = region.column + (region.down ? line : along);
      to.at[t] = row * a.width.output + column;
      row = row * a.height.stride - a.height.padding, column = column * a.width.stride - a.width.padding;
      if (region.inside) add_inside(to, t, image + (row * a.width.input + column) * plan.pitch);
      else add_pixel(to, t, image, row, column);
      if (++along == side) along = 0, line++;
    }
    leave_out(to, region.inside);
  }

  bool outside(const Block& of, int64_t run) const {
    for (int64_t t = 0; t < of.pixels; t++)
      if (of.run[run].from[t] != zeros) return false;
    return true;
  }
  // Runs that are outside for all pixels are left out.
  void leave_out(Block& to, bool inside) const {
    to.runs = 0;
    for (int64_t i = 0; i < plan.runs; i++) {
      if (!inside && outside(to, i)) continue;
      if (to.runs != i) to.run[to.runs] = to.run[i];
      to.run[to.runs++].weight = i * plan.length * kConvPanel;
    }
  }

  // What is fetched while block b of a chunk is multiplied with panel `panel`.
  void fetch(int64_t b, int64_t count, int64_t panel, int64_t image, DirectPanel* p) const {
    const int64_t floats = plan.runs * plan.length * kConvPanel;
    const char* here = reinterpret_cast<const char*>(p->weight);
    p->read = p->written = p->added = {here, 0};
    if (!plan.small) {
      // The first block reads the panel from memory, which is slower than it multiplies; the others leave memory idle. So
      // the first two fetch a half each of the next one.
      if (b < 2) p->read = {here + (2 + b) * floats / 2 * 4, 64};
      return;
    }
    if (b + 1 == count) return;
    const Block& next = block(b + 1);
    const int64_t last = next.pixels - 1, pixels = image * a.height.output * a.width.output + next.at[0];
    if (next.at[last] - next.at[0] == last) {
      p->written = plan.written.part(a.y + pixels * a.out_channels, panel);
      if (a.other) p->added = plan.written.part(a.other + pixels * a.out_channels, panel);
    }
    if (next.runs == 0) return;
    const auto& run = next.run[next.runs - 1];
    const int64_t span = run.from[last] - run.from[0];
    if (run.from[0] != zeros && run.from[last] != zeros && span >= 0 && span <= next.pixels * a.width.stride * plan.pitch)
      p->read = plan.read.part(run.from[0], panel);
  }

  void multiply(int64_t b, int64_t count, int64_t panel, int64_t group, int64_t image) const {
    DirectPanel p{a.weight + (group * plan.panels + panel) * plan.runs * plan.length * kConvPanel, plan.length};
    fetch(b, count, panel, image, &p);
    multiply_block<V>(a, block(b), group, panel, image, p);
  }

  void run_image(const Team& team, int64_t index) const {
    const float* image = a.x + index * a.height.input * a.width.input * a.in_channels;
    int64_t begin, end;
    if (plan.crowded) {
      team.share(a.height.input, 1, &begin, &end);
      copy_rows(image, begin, end);
      image = copied;
      team.barrier();
    }
    for (int64_t group = 0; group < a.groups; group++)
      for (int64_t b0 = 0; b0 < plan.blocks; b0 += plan.chunk) {
        const int64_t count = least(plan.chunk, plan.blocks - b0);
        team.share(count, 1, &begin, &end);
        for (int64_t b = begin; b < end; b++) prepare(b0 + b, b, image + group * plan.channels);
        team.barrier();
        team.share(plan.panels * count, 1, &begin, &end);
        const int64_t inner = plan.small ? plan.panels : count;  // counted without divisions
        for (int64_t u = begin, outer = begin / inner, i = begin % inner; u < end; u++) {
          plan.small ? multiply(outer, count, i, group, index) : multiply(i, count, outer, group, index);
          if (++i == inner) i = 0, outer++;
        }
        team.barrier();  // the tables are still being read
      }
  }

  void run(const Team& team) const {
    if (team.me == 0) std::memset(zeros, 0, static_cast<size_t>(plan.zero_bytes()));
    team.barrier();
    for (int64_t image = 0; image < a.images; image++) run_image(team, image);
  }
};

template <class V>
int64_t direct_workspace(const DenseConv& given) {
  if (by_lines(given)) return LinePlan<V>(given).bytes(given.threads);
  const DenseConv a = flattened<V>(given);
  return DirectPlan<V>(a).bytes(a);
}

template <class V>
void direct(const DenseConv& given) {
  if (by_lines(given)) return direct_by_lines<V>(given);
  const DenseConv a = flattened<V>(given);
  const Direct<V> conv(a);
  with_team(a.threads, [&](const Team& team) { conv.run(team); });
}

}  // namespace
